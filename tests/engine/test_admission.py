"""What the facade refuses at once, and that nothing moves when it does."""

import asyncio
from functools import partial
from typing import Any

import pytest

from embedding.errors import PositionOverflow
from embedding.tokenizer import END_OF_TEXT
from engine.commands import Open, ReplyLimit, Truncate
from engine.errors import (
    BosNotAtStart,
    EmptySession,
    PastLengthMismatch,
    PositionsOutOfRange,
    QueueFull,
    ReplyTooLarge,
    SessionBusy,
    ShuttingDown,
)
from model.points import Point
from sessions.errors import LengthOutOfRange, SessionNotFound, TooManySessions
from tests.engine.doubles import Gated
from tests.engine.rig import (
    LONG,
    Rig,
    assert_refused,
    capture,
    gate,
    happened,
    ids_of,
    in_loop,
    running,
    some_ids,
)


def state(rig: Rig, session_id: str) -> tuple[object, ...]:
    """All that a refusal must leave alone."""
    passes = len(rig.model.passes)
    return rig.session(session_id), rig.engine.view(session_id).kv, rig.cache.usage(), passes


@in_loop
async def test_append_at_the_limits_of_the_context() -> None:
    async with running(checkpoint=LONG) as rig:
        for n in (1, 1023, 1024):
            session_id = await rig.open()
            assert (await rig.appended(session_id, some_ids(n))).session.past_length == n
            before = state(rig, session_id)
            with pytest.raises(PositionOverflow) as refused:
                rig.append(session_id, some_ids(1025 - n))
            error = refused.value
            assert (error.past_length, error.n_new, error.n_ctx) == (n, 1025 - n, 1024)
            assert state(rig, session_id) == before
        session_id = await rig.open()
        with pytest.raises(PositionOverflow):
            rig.append(session_id, some_ids(1025))
        with pytest.raises(PositionOverflow):
            rig.append(session_id, some_ids(1024), prepend_bos=True)
        assert rig.length(session_id) == 0


@in_loop
async def test_c01_c12_the_last_positions() -> None:
    async with running(checkpoint=LONG) as rig:
        session_id = await rig.open(some_ids(1000))
        with pytest.raises(PositionOverflow):
            rig.append(session_id, some_ids(25))
        assert rig.length(session_id) == 1000
        await rig.appended(session_id, some_ids(23))
        await rig.appended(session_id, [7])
        with pytest.raises(PositionOverflow):
            rig.append(session_id, [7])
        assert rig.length(session_id) == 1024


@in_loop
async def test_generate_at_the_limits_of_the_context() -> None:
    async with running(checkpoint=LONG) as rig:
        session_id = await rig.open(some_ids(1000))
        with pytest.raises(PositionOverflow) as refused:  # C04
            rig.generate(session_id, 25)
        assert (refused.value.past_length, refused.value.n_new) == (1000, 25)
        done = await rig.generated(session_id, 23, ignore_eos=True)
        assert done.session.past_length == 1023
        with pytest.raises(PositionOverflow):
            rig.generate(session_id, 2)
        done = await rig.generated(session_id, ignore_eos=True)  # all that remains
        assert [(r.position, r.finish_reason) for r in done.records] == [(1023, "length")]
        for max_tokens in (None, 1, 1024):
            with pytest.raises(PositionOverflow) as refused:
                rig.generate(session_id, max_tokens)
            assert refused.value.n_new == (max_tokens or 1)
        assert rig.length(session_id) == 1024


@in_loop
async def test_open_at_the_limits_of_the_context() -> None:
    async with running(checkpoint=LONG) as rig:
        for n, bos in ((1, False), (1023, True), (1024, False)):
            view = await rig.engine.open(
                Open(token_ids=tuple(some_ids(n)), prepend_bos=bos, ttl_seconds=9)
            )
            assert view.session.past_length == n + bos
            assert view.kv == "resident"
        for n, bos in ((1025, False), (1024, True)):
            with pytest.raises(PositionOverflow):
                await rig.engine.open(
                    Open(token_ids=tuple(some_ids(n)), prepend_bos=bos, ttl_seconds=9)
                )
        assert len(rig.engine.registry) == 3
        assert rig.n_places() == 3


@in_loop
async def test_what_an_opened_session_says_of_itself() -> None:
    async with running(clock=lambda: 5000.0) as rig:
        command = Open(token_ids=(1, 2), ttl_seconds=60, owner="me", metadata={"a": "b"})
        view = await rig.engine.open(command)
        session = view.session
        assert (session.token_ids, session.created, session.ttl_seconds) == ((1, 2), 5000.0, 60)
        assert (session.owner, dict(session.metadata)) == ("me", {"a": "b"})
        assert (view.expires, view.kv) == (5060.0, "resident")
        assert rig.engine.view(session.id, "me") == view
        assert rig.engine.views("me", limit=5).views == (view,)
        assert rig.engine.views("you", limit=5).views == ()


@in_loop
async def test_a_beginning_of_text_only_at_the_beginning() -> None:
    async with running() as rig:
        session_id = await rig.open()
        done = await rig.appended(session_id, [5], prepend_bos=True)
        assert ids_of(done.records) == [END_OF_TEXT, 5]
        with pytest.raises(BosNotAtStart) as refused:
            rig.append(session_id, [5], prepend_bos=True)
        assert refused.value.past_length == 2


@in_loop
async def test_generating_on_an_empty_session_is_refused() -> None:
    async with running() as rig:
        session_id = await rig.open()
        with pytest.raises(PastLengthMismatch):  # the length comes first
            rig.generate(session_id, 5, past_length=1)
        with pytest.raises(EmptySession):
            rig.generate(session_id, 5, past_length=0)
        await rig.appended(session_id, [END_OF_TEXT])
        assert len((await rig.generated(session_id, 5, ignore_eos=True)).records) == 5


@in_loop
async def test_x08_p16_a_retry_with_its_expected_length_has_no_second_effect() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(10))
        await rig.appended(session_id, [1], past_length=10)
        before = state(rig, session_id)
        for refused in assert_refused(
            PastLengthMismatch,
            lambda: rig.append(session_id, [1], past_length=10),
            lambda: rig.generate(session_id, 1, past_length=10),
            lambda: rig.append(session_id, some_ids(11), past_length=0),
        ):
            assert refused.past_length == 11
        with pytest.raises(PastLengthMismatch):
            await rig.engine.truncate(Truncate(session_id=session_id, to=0, past_length=10))
        assert state(rig, session_id) == before


@in_loop
async def test_a_second_mutation_is_busy_at_once_while_the_model_is_blocked() -> None:
    async with running(partial(Gated, open_passes=1)) as rig:
        session_id = await rig.open(some_ids(4))
        reply = rig.append(session_id, [1, 2])
        await happened(gate(rig).arrived)
        assert_refused(
            SessionBusy,
            lambda: rig.append(session_id, [1]),
            lambda: rig.generate(session_id, 1),
            lambda: rig.append(session_id, [1], past_length=99),  # busy comes first
            lambda: rig.append(session_id, some_ids(200)),
        )
        with pytest.raises(SessionBusy):
            await rig.engine.truncate(Truncate(session_id=session_id, to=0))
        assert rig.engine.view(session_id).session.past_length == 4  # what sees never waits
        rig.model.release()
        assert (await reply.result()).session.past_length == 6
        assert (await rig.appended(session_id, [1])).session.past_length == 7


@in_loop
async def test_another_owners_session_is_not_there() -> None:
    async with running() as rig:
        session_id = await rig.open([1], owner="a")
        assert_refused(
            SessionNotFound,
            lambda: rig.engine.view(session_id, "b"),
            lambda: rig.append(session_id, [1], owner="b"),
            lambda: rig.generate(session_id, 1, owner="b"),
            lambda: rig.engine.views("b", limit=1, after=session_id),
        )
        for refusal in (
            rig.engine.truncate(Truncate(session_id=session_id, to=0, owner="b")),
            rig.engine.delete(session_id, "b"),
            rig.engine.delete("sess_unknown", "a"),
        ):
            with pytest.raises(SessionNotFound):
                await refusal
        assert rig.engine.view(session_id, "a").session.past_length == 1


@in_loop
async def test_the_queue_is_bounded_and_frees_itself() -> None:
    async with running(partial(Gated, open_passes=3), max_queue=2) as rig:
        a, b, c = [await rig.open([i]) for i in range(3)]
        replies = [rig.append(a, [1]), rig.append(b, [1])]
        assert_refused(QueueFull, lambda: rig.append(c, [1]), lambda: rig.generate(c, 1))
        with pytest.raises(QueueFull):
            await rig.open()
        with pytest.raises(QueueFull):
            await rig.engine.truncate(Truncate(session_id=c, to=0))
        assert not rig.engine.registry.is_busy(c)
        rig.model.release()
        for reply in replies:
            await reply.result()
        assert (await rig.appended(c, [1])).session.past_length == 2


@in_loop
async def test_sessions_are_bounded_those_being_opened_too() -> None:
    async with running(Gated, max_sessions=2) as rig:
        first = await rig.open()
        task = asyncio.create_task(rig.open([1]))
        await happened(gate(rig).arrived)
        for token_ids in ([], [5]):
            with pytest.raises(TooManySessions):
                await rig.open(token_ids)
        rig.model.release()
        second = await task
        with pytest.raises(TooManySessions):
            await rig.open()
        await rig.engine.delete(first)
        third = await rig.open([2])
        assert {v.session.id for v in rig.engine.views(limit=9).views} == {second, third}


@pytest.mark.parametrize(
    ("positions", "wrong"), [({3}, 3), ({4, 6}, 6), ({4, 5, 1000}, 1000), ({0}, 0)]
)
@in_loop
async def test_points_only_at_positions_that_are_stepped(positions: set[int], wrong: int) -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(4))
        asked = capture(Point("wte"), positions=frozenset(positions))
        for refused in assert_refused(
            PositionsOutOfRange,
            lambda: rig.append(session_id, [1, 2], capture=asked),
            lambda: rig.generate(session_id, 2, capture=asked),
        ):
            assert (refused.position, refused.past_length) == (wrong, 4)


@in_loop
async def test_an_answer_that_would_be_too_large_is_refused_before_any_compute() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(4))
        before = state(rig, session_id)
        held: list[int] = []
        limit = ReplyLimit(
            bytes_per_record=100, bare_bytes_per_record=10, max_bytes=999, hold=held.append
        )
        asked: dict[str, Any] = {"capture": capture(Point("wte")), "reply_limit": limit}
        with pytest.raises(ReplyTooLarge) as refused:
            rig.append(session_id, some_ids(10), **asked)
        assert (refused.value.n_bytes, refused.value.max_bytes) == (1000, 999)
        assert state(rig, session_id) == before
        assert len((await rig.appended(session_id, some_ids(9), **asked)).records) == 9
        asked["capture"] = capture(Point("wte"), positions=frozenset([13]))
        assert len((await rig.appended(session_id, some_ids(10), **asked)).records) == 10
        assert held == [900, 190]


@in_loop
async def test_an_answer_that_finds_no_room_is_refused_without_effect() -> None:
    def full(n_bytes: int) -> None:
        raise MemoryError(n_bytes)

    async with running() as rig:
        session_id = await rig.open(some_ids(4))
        before = state(rig, session_id)
        limit = ReplyLimit(bytes_per_record=1, bare_bytes_per_record=1, max_bytes=1000, hold=full)
        with pytest.raises(MemoryError):
            rig.append(session_id, some_ids(10), reply_limit=limit)
        assert state(rig, session_id) == before
        await rig.appended(session_id, [1])


@pytest.mark.parametrize("to", [-2, 4, 1000])
@in_loop
async def test_p11_truncating_to_what_never_was_is_refused(to: int) -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(3))
        with pytest.raises(LengthOutOfRange):
            await rig.engine.truncate(Truncate(session_id=session_id, to=to))
        assert rig.length(session_id) == 3
        assert not rig.engine.registry.is_busy(session_id)


@in_loop
async def test_p11_truncated_to_0_is_like_new() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(40))
        view = await rig.engine.truncate(Truncate(session_id=session_id, to=0))
        assert (view.session.past_length, view.kv) == (0, "resident")
        assert rig.cache.usage().bytes_used == 0
        done = await rig.appended(session_id, [15496], capture=capture(Point("ln_f")))
        new = await rig.appended(await rig.open(), [15496], capture=capture(Point("ln_f")))
        assert (done.records[0].position, done.usage.rebuilt_tokens) == (0, 0)
        assert (done.records[0].points[Point("ln_f")] == new.records[0].points[Point("ln_f")]).all()


@in_loop
async def test_a_bad_request_leaves_the_session_free() -> None:
    """Whatever is wrong with a command, the session is not busy for ever after."""
    async with running() as rig:
        session_id = await rig.open([1])
        with pytest.raises(UnicodeEncodeError):
            rig.generate(session_id, 1, stop=("\ud83d",))
        assert not rig.engine.registry.is_busy(session_id)
        assert (await rig.appended(session_id, [1])).session.past_length == 2


@in_loop
async def test_a_draining_engine_takes_nothing_new() -> None:
    async with running() as rig:
        session_id = await rig.open([1])
        await rig.engine.drain(1)
        assert rig.engine.admission.draining
        assert_refused(
            ShuttingDown, lambda: rig.append(session_id, [1]), lambda: rig.generate(session_id)
        )
        for refusal in (
            rig.open(),
            rig.engine.truncate(Truncate(session_id=session_id, to=0)),
        ):
            with pytest.raises(ShuttingDown):
                await refusal
        assert rig.engine.view(session_id).session.past_length == 1

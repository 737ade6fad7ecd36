import asyncio
from functools import partial

import pytest

from cache.accounting import PIECE
from embedding.errors import PositionOverflow
from engine.commands import Truncate
from engine.errors import NoRoom, PastLengthMismatch, StepFailed
from model.points import Point
from sessions.errors import LengthOutOfRange, SessionNotFound, TooManySessions
from sessions.log import MemoryLog, Opened
from sessions.session import Parent
from tests.agreement import assert_agrees
from tests.engine.doubles import Failing, FailingLog, Gated, steps_token
from tests.engine.rig import (
    CONFIG,
    LIVELY,
    LONG,
    Rig,
    capture,
    ended,
    gate,
    happened,
    in_loop,
    pieces,
    running,
    some_ids,
)
from tests.reference import reference_points

LN_F = capture(Point("ln_f"))


async def assert_right(rig: Rig, session_id: str, history: list[int], seed: int) -> None:
    """What the session has is `history`, and what it steps next agrees with all of it."""
    assert list(rig.session(session_id).token_ids) == history
    new = some_ids(3, seed=seed)
    done = await rig.appended(session_id, new, capture=LN_F)
    expected = reference_points(LIVELY, history + new)["ln_f"][len(history) :]
    for record, row in zip(done.records, expected, strict=True):
        assert_agrees(record.points[Point("ln_f")], row, what="ln_f")
    history += new


@pytest.mark.parametrize("at", [0, 1, 31, 32, 33, 64, 70])
@in_loop
async def test_parent_and_child_diverge_and_both_stay_right(at: int) -> None:
    async with running() as rig:
        prompt = some_ids(70)
        parent = await rig.open(prompt)
        child = await rig.fork(parent, at)
        assert rig.session(child).parent == Parent(parent, past_length=at)
        assert rig.engine.view(child).kv == "resident"
        assert len(rig.model.passes) == 1  # nothing was stepped again
        histories = {parent: list(prompt), child: prompt[:at]}
        for seed, session_id in enumerate([child, parent, child, parent]):
            await assert_right(rig, session_id, histories[session_id], seed)
        await rig.engine.delete(parent)
        await assert_right(rig, child, histories[child], 9)


@in_loop
async def test_a_child_of_a_child_that_outlives_both() -> None:
    async with running() as rig:
        prompt, more = some_ids(50), some_ids(30, seed=1)
        parent = await rig.open(prompt)
        child = await rig.fork(parent, 40, more)
        grandchild = await rig.fork(child, 60)
        await rig.engine.truncate(Truncate(session_id=child, to=10))
        await rig.appended(child, some_ids(20, seed=2))
        await rig.engine.delete(parent)
        await rig.engine.delete(child)
        await assert_right(rig, grandchild, prompt[:40] + more[:20], 3)


@in_loop
async def test_a_fork_takes_no_memory_and_its_first_step_one_piece() -> None:
    async with running() as rig:
        parent = await rig.open(some_ids(70))
        before = rig.cache.usage()
        child = await rig.fork(parent)
        assert rig.cache.usage().bytes_used == before.bytes_used
        assert rig.cache.usage().bytes_shared == pieces(3)
        await rig.appended(child, [1])
        assert rig.cache.usage().bytes_used == before.bytes_used + pieces(1)
        assert rig.cache.usage().bytes_shared == pieces(2)


@in_loop
async def test_100_forks_of_a_long_prefix_use_one_prefix() -> None:
    async with running(checkpoint=LONG) as rig:
        parent = await rig.open(some_ids(800))
        one = rig.cache.usage().bytes_used
        children = [await rig.fork(parent) for _ in range(100)]
        assert rig.cache.usage().bytes_used - one < one
        replies = [rig.append(child, [i]) for i, child in enumerate(children)]
        await asyncio.gather(*map(ended, replies))
        assert rig.cache.usage().bytes_used == one * (25 + 100) // 25  # a piece each for its own


@in_loop
async def test_edit_at_a_position_in_one_call() -> None:
    async with running() as rig:
        prompt = some_ids(40)
        parent = await rig.open(prompt)
        edited = [*prompt[:12], 50256, *prompt[13:]]
        child = await rig.fork(parent, 12, edited[12:])
        await assert_right(rig, child, edited, 1)
        await assert_right(rig, parent, prompt, 2)


@in_loop
async def test_refusals_leave_no_child() -> None:
    async with running(max_sessions=2) as rig:
        parent = await rig.open(some_ids(100))
        fork = partial(rig.fork, parent)
        with pytest.raises(PositionOverflow):
            await fork(90, [0] * (CONFIG.n_ctx - 89))
        with pytest.raises(LengthOutOfRange):
            await fork(101)
        with pytest.raises(PastLengthMismatch):
            await fork(5, past_length=99)
        with pytest.raises(SessionNotFound):
            await rig.fork("sess_unknown")
        with pytest.raises(SessionNotFound):
            await fork(5, owner="another")
        assert len(rig.engine.registry) == 1
        await fork(5, past_length=100)
        with pytest.raises(TooManySessions):
            await fork(5)


@in_loop
async def test_a_step_that_fails_leaves_no_child_and_an_untouched_parent() -> None:
    async with running(partial(Failing, when=steps_token(666))) as rig:
        prompt = some_ids(40)
        parent = await rig.open(prompt)
        used = rig.cache.usage().bytes_used
        with pytest.raises(StepFailed):
            await rig.fork(parent, 35, [1, 666])
        await rig.settled()
        assert len(rig.engine.registry) == 1
        assert rig.cache.usage().bytes_used == used
        await assert_right(rig, parent, prompt, 1)


@in_loop
async def test_no_room_for_the_childs_tokens_leaves_no_child() -> None:
    async with running(budget_bytes=pieces(3)) as rig:
        parent = await rig.open(some_ids(40))
        with pytest.raises(NoRoom):
            await rig.fork(parent, 40, [0] * 88)
        assert len(rig.engine.registry) == 1
        assert rig.places() == {parent}


@in_loop
async def test_a_fork_of_an_evicted_session_is_rebuilt_when_it_steps() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        prompt = some_ids(40)
        parent = await rig.open(prompt)
        await rig.open(some_ids(120, seed=1))
        child = await rig.fork(parent, 36)
        assert rig.engine.view(child).kv == "evicted"
        await assert_right(rig, child, prompt[:36], 2)


@in_loop
async def test_x02_a_fork_during_a_stream_has_a_length_that_existed() -> None:
    """It does not wait for the stream, and neither notices the other."""
    async with running(partial(Gated, open_passes=1)) as rig:
        prompt = some_ids(40)
        parent = await rig.open(prompt)
        stream = rig.generate(parent, 60, atomic=False, ignore_eos=True)
        await happened(gate(rig).arrived)
        gate(rig).let(5)
        forks = []
        for _ in range(3):
            forking = asyncio.create_task(rig.fork(parent))
            gate(rig).let(5)
            forks.append(await forking)
        rig.model.release()
        done = await ended(stream)
        history = prompt + [record.token_id for record in done.records]
        for seed, child in enumerate(forks):
            length = rig.length(child)
            assert 40 <= length <= 100
            await assert_right(rig, child, history[:length], seed)
        await assert_right(rig, parent, history, 7)


@in_loop
async def test_the_log_has_the_child_with_all_its_tokens() -> None:
    log = FailingLog(lambda batch: False)
    async with running(log=log) as rig:
        parent = await rig.open(some_ids(10))
        child = await rig.fork(parent, 4, [7, 8])
        assert log.sessions[child] == rig.session(child)
        assert log.sessions[child].token_ids == (*some_ids(10)[:4], 7, 8)


@in_loop
async def test_a_child_that_the_log_could_not_keep_holds_nothing() -> None:
    kept = MemoryLog()
    log = FailingLog(lambda batch: any(isinstance(e, Opened) and e.session.parent for e in batch))
    log.kept = kept
    async with running(log=log) as rig:
        parent = await rig.open(some_ids(40))
        for tokens in ([], [1]):
            with pytest.raises(StepFailed):
                await rig.fork(parent, 35, tokens)
        await rig.settled()
        assert rig.places() == {parent}
        assert rig.cache.usage().bytes_used == pieces(-(-40 // PIECE))


@in_loop
async def test_a_fork_keeps_what_its_parent_was_opened_with() -> None:
    async with running() as rig:
        parent = await rig.open([1], ttl=77, owner="me")
        view = await rig.forked(parent, owner="me", metadata={"a": "b"})
        assert (view.session.ttl_seconds, view.session.owner) == (77, "me")
        assert view.session.metadata == {"a": "b"}
        view = await rig.forked(parent, owner="me", ttl_seconds=5)
        assert view.session.ttl_seconds == 5


@in_loop
async def test_a_fork_can_fill_a_budget_of_one_session() -> None:
    """The piece that it shares with its idle parent is its own once the parent is evicted."""
    async with running(budget_bytes=pieces(4)) as rig:
        prompt = some_ids(40)
        parent = await rig.open(prompt)
        child = await rig.fork(parent)
        await rig.appended(child, some_ids(88, seed=1))
        assert (rig.length(child), rig.places()) == (CONFIG.n_ctx, {child})
        await assert_right(rig, parent, prompt, 2)


@in_loop
async def test_forking_is_a_use_of_the_parent() -> None:
    async with running(budget_bytes=pieces(6)) as rig:
        template = await rig.open(some_ids(40))
        other = await rig.open(some_ids(40, seed=1))
        await rig.fork(template)
        await rig.open(some_ids(90, seed=2))
        assert rig.engine.view(template).kv == "resident"
        assert rig.engine.view(other).kv == "evicted"


@in_loop
async def test_many_forks_fit_where_few_sessions_would() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        parent = await rig.open(some_ids(60))
        children = [await rig.fork(parent) for _ in range(20)]
        assert all(rig.engine.view(child).kv == "resident" for child in children)
        assert not any(rig.engine.stats().evictions.values())

"""Faults of the model, of one row, of the log and of the thread; what is told and what is left."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from engine.commands import Truncate
from engine.errors import EngineDown, StepFailed
from engine.events import Failed, StepRecord
from engine.reply import Reply
from model.points import Point
from sessions.errors import SessionNotFound
from sessions.log import Committed, Deleted, Entry, Opened, Truncated
from tests.agreement import assert_agrees
from tests.engine.doubles import (
    Counting,
    Failing,
    FailingLog,
    FailingLogits,
    Rows,
    steps_position,
    steps_token,
)
from tests.engine.rig import (
    LIVELY,
    Rig,
    assert_refused,
    capture,
    eventually,
    gate,
    happened,
    ids_of,
    in_loop,
    running,
    some_ids,
)
from tests.engine.test_streams import last
from tests.reference import reference_points

HIDDEN = capture(Point("ln_f"))
POISON = 666


def failing(rig: Rig) -> Failing:
    assert isinstance(rig.model, Failing)
    return rig.model


def rows_present(rig: Rig, session_id: str) -> int:
    return rig.engine._thread.places._places[session_id].length


async def assert_goes_on(rig: Rig, session_id: str, token_ids: Sequence[int]) -> None:
    """The session holds exactly these tokens, and its next step is right."""
    assert rig.session(session_id).token_ids == tuple(token_ids)
    done = await rig.appended(session_id, [15496], capture=HIDDEN)
    (record,) = done.records
    assert record.position == len(token_ids)
    expected = reference_points(LIVELY, [*token_ids, 15496])["ln_f"][-1]
    assert_agrees(record.points[Point("ln_f")], expected)


async def failed(reply: Reply) -> tuple[list[StepRecord], Failed]:
    records, event = await last(reply)
    assert isinstance(event, Failed)
    assert isinstance(event.error, StepFailed)
    return records, event


# The model.


@pytest.mark.parametrize("step", [0, 4])
@in_loop
async def test_s09_a_fault_leaves_nothing_of_an_atomic_answer(step: int) -> None:
    prompt = some_ids(7)
    async with running(partial(Failing, when=steps_position(7 + step))) as rig:
        session_id = await rig.open(prompt)
        before = rig.session(session_id), rig.cache.usage()
        records, event = await failed(rig.generate(session_id, 20, ignore_eos=True))
        assert (records, event.session) == ([], before[0])
        assert (rig.session(session_id), rig.cache.usage()) == before
        assert rows_present(rig, session_id) == 7
        failing(rig).when = lambda rows: False
        await assert_goes_on(rig, session_id, prompt)


@pytest.mark.parametrize("step", [0, 4])
@in_loop
async def test_s09_a_fault_leaves_what_a_stream_has_told(step: int) -> None:
    prompt = some_ids(7)
    async with running(partial(Failing, when=steps_position(7 + step))) as rig:
        session_id = await rig.open(prompt)
        reply = rig.generate(session_id, 20, atomic=False, ignore_eos=True)
        records, event = await failed(reply)
        assert [record.position for record in records] == list(range(7, 7 + step))
        assert event.session == rig.session(session_id)
        assert rows_present(rig, session_id) == 7 + step
        failing(rig).when = lambda rows: False
        await assert_goes_on(rig, session_id, [*prompt, *ids_of(records)])


@pytest.mark.parametrize("atomic", [True, False])
@in_loop
async def test_a_fault_in_a_later_chunk_of_an_append(atomic: bool) -> None:
    token_ids = some_ids(30)
    async with running(partial(Failing, when=steps_position(25)), prefill_chunk=10) as rig:
        session_id = await rig.open([1])
        records, event = await failed(rig.append(session_id, token_ids, atomic=atomic))
        kept = [] if atomic else token_ids[:20]
        assert ids_of(records) == kept
        assert event.session == rig.session(session_id)
        failing(rig).when = lambda rows: False
        await assert_goes_on(rig, session_id, [1, *kept])


@in_loop
async def test_a_fault_while_opening_leaves_no_session_and_no_place() -> None:
    async with running(partial(Failing, when=steps_position(20)), prefill_chunk=8) as rig:
        with pytest.raises(StepFailed):
            await rig.open(some_ids(30))
        assert len(rig.engine.registry) == 0
        assert (rig.n_places(), rig.cache.usage().bytes_used) == (0, 0)


@in_loop
async def test_one_rows_fault_does_not_touch_its_mates() -> None:
    async with running(partial(Failing, when=steps_token(POISON)), prefill_chunk=64) as rig:
        prompts = [some_ids(5, seed=i) for i in range(4)]
        sessions = [await rig.open(prompt) for prompt in prompts]
        ill = await rig.open([3])
        mates = [rig.generate(s, 30, ignore_eos=True) for s in sessions]
        _, event = await failed(rig.append(ill, [1, POISON, 2]))
        assert event.session == rig.session(ill)
        together = [ids_of((await mate.result()).records) for mate in mates]
    async with running() as rig:
        alone = [
            ids_of((await rig.generated(await rig.open(p), 30, ignore_eos=True)).records)
            for p in prompts
        ]
    assert together == alone


@in_loop
async def test_a_batch_that_fails_as_a_whole_is_stepped_row_by_row() -> None:
    """Every pass of two rows or more fails, and nobody notices."""
    when: Callable[[Rows], bool] = lambda rows: len(rows) > 1  # noqa: E731  # typed for partial
    async with running(partial(Failing, when=when)) as rig:
        sessions = [await rig.open([i]) for i in range(3)]
        done = await asyncio.gather(*[rig.generated(s, 10, ignore_eos=True) for s in sessions])
        together = [ids_of(one.records) for one in done]
        solo = [await rig.generated(await rig.open([i]), 10, ignore_eos=True) for i in range(3)]
        assert together == [ids_of(one.records) for one in solo]


@in_loop
async def test_a_row_whose_numbers_are_not_finite_fails_alone() -> None:
    """The poison is planted in one slot's cache, where only its own session reads it."""
    async with running() as rig:
        ill, mate = await rig.open(some_ids(9)), await rig.open(some_ids(8))
        slot = rig.engine._thread.places._places[ill].slots[0]
        rig.cache.buffers.values[:, slot, :, 3] = float("nan")
        talk = rig.generate(mate, 30, ignore_eos=True)
        _, event = await failed(rig.append(ill, [1, 2]))
        assert event.session == rig.session(ill)
        together = ids_of((await talk.result()).records)
        alone = await rig.generated(await rig.open(some_ids(8)), 30, ignore_eos=True)
        assert together == ids_of(alone.records)
        assert np.isfinite(rig.cache.buffers.values[:, slot, :, 9:].numpy()).all()


@pytest.mark.parametrize("position", [4, 9])
@in_loop
async def test_logits_that_cannot_be_read_fail_their_own_row(position: int) -> None:
    """At 4 before the first id, at 9 in the middle."""
    async with running(partial(FailingLogits, position=position)) as rig:
        ill, mate = await rig.open(some_ids(5)), await rig.open(some_ids(30))
        talk = rig.generate(mate, 20, ignore_eos=True)
        records, event = await failed(rig.generate(ill, 20, atomic=False, ignore_eos=True))
        assert [r.position for r in records] == list(range(5, position))
        assert event.session == rig.session(ill)
        assert len((await talk.result()).records) == 20
        await assert_goes_on(rig, ill, [*some_ids(5), *ids_of(records)])


@in_loop
async def test_the_message_of_a_fault_holds_nothing_of_the_clients() -> None:
    async with running(partial(Failing, when=steps_token(POISON))) as rig:
        session_id = await rig.open([1])
        _, event = await failed(rig.append(session_id, [POISON]))
        assert str(event.error) == "a step failed with RuntimeError"


# The thread.


class Death(BaseException):
    """What no row can be blamed for."""


@in_loop
async def test_the_death_of_the_thread_ends_every_request() -> None:
    double = partial(Failing, when=steps_token(POISON), error=Death, open_passes=5)
    async with running(double) as rig:
        a, b, c = [await rig.open(some_ids(3, seed=i)) for i in range(3)]
        assert rig.engine.heartbeat_age() < 60
        replies = [
            rig.generate(a, 100, atomic=False, ignore_eos=True),
            rig.generate(b, 100, ignore_eos=True),
            rig.append(c, [POISON]),
        ]
        rig.model.release()
        told = [await last(reply) for reply in replies]
        for (records, event), session_id in zip(told, (a, b, c), strict=True):
            assert isinstance(event, Failed)
            assert isinstance(event.error, EngineDown)
            assert event.session == rig.session(session_id)
            assert rig.length(session_id) == 3 + len(records)
            assert not rig.engine.registry.is_busy(session_id)
        assert rig.engine.heartbeat_age() == float("inf")
        assert_refused(EngineDown, lambda: rig.append(a, [1]), lambda: rig.generate(a, 1))
        refusals = [
            rig.open(),
            rig.engine.delete(b),
            rig.engine.truncate(Truncate(session_id=a, to=0)),
        ]
        for refusal in refusals:
            with pytest.raises(EngineDown):
                await refusal
        assert rig.engine.view(b).session.past_length == 3  # not deleted: it was refused
        await rig.engine.drain(1000)


@in_loop
async def test_requests_that_came_while_the_thread_died_end_too() -> None:
    double = partial(Failing, when=lambda rows: True, error=Death, open_passes=0)
    async with running(double) as rig:
        empty = [await rig.open() for _ in range(3)]
        first = rig.append(empty[0], [1])
        await happened(gate(rig).arrived)
        waiting = rig.append(empty[1], [1])
        deletion = asyncio.create_task(rig.engine.delete(empty[2]))
        opening = asyncio.create_task(rig.open([1]))
        await asyncio.sleep(0)
        rig.model.release()
        for reply in (first, waiting):
            with pytest.raises(EngineDown):
                await reply.result()
        for task in (deletion, opening):
            with pytest.raises(EngineDown):
                await task


# The log.


def nth(n: int, kind: type[Entry]) -> Callable[[Sequence[Entry]], bool]:
    """The batch with the n-th entry of a kind, from 0."""
    seen = -1

    def when(batch: Sequence[Entry]) -> bool:
        nonlocal seen
        seen += sum(isinstance(entry, kind) for entry in batch)
        return seen == n and any(isinstance(entry, kind) for entry in batch)

    return when


@pytest.mark.parametrize("n", [0, 3])
@in_loop
async def test_a_stream_whose_commit_is_lost_is_told_and_nothing_more(n: int) -> None:
    log = FailingLog(nth(n, Committed))
    async with running(log=log) as rig:
        prompt = some_ids(4)
        session_id = await rig.open(prompt)
        reply = rig.generate(session_id, 50, atomic=False, ignore_eos=True)
        records, event = await failed(reply)
        assert [r.position for r in records] == list(range(4, 4 + n))
        assert event.session == rig.session(session_id) == log.sessions[session_id]
        assert len(rig.model.passes) <= 1 + n + 2  # one iteration ahead at most
        await rig.settled()
        await assert_goes_on(rig, session_id, [*prompt, *ids_of(records)])
        assert log.sessions[session_id] == rig.session(session_id)


@pytest.mark.parametrize("kind", ["append", "generate"])
@in_loop
async def test_an_atomic_answer_whose_commit_is_lost_leaves_the_session_as_before(
    kind: str,
) -> None:
    log = FailingLog(nth(0, Committed))
    async with running(log=log, prefill_chunk=4) as rig:
        session_id = await rig.open(some_ids(4))
        before = rig.session(session_id)
        if kind == "append":
            reply = rig.append(session_id, some_ids(9, seed=1))
        else:
            reply = rig.generate(session_id, 9, ignore_eos=True)
        _, event = await failed(reply)
        assert event.session == before == rig.session(session_id)
        await rig.settled()
        assert rows_present(rig, session_id) == 4
        await assert_goes_on(rig, session_id, some_ids(4))


@pytest.mark.parametrize("token_ids", [[], [1, 2, 3]])
@in_loop
async def test_an_opening_that_is_lost_leaves_no_session_and_no_place(
    token_ids: list[int],
) -> None:
    log = FailingLog(nth(0, Opened))
    async with running(log=log) as rig:
        with pytest.raises(StepFailed):
            await rig.open(token_ids)
        await rig.settled()
        assert len(rig.engine.registry) == 0
        assert rig.places() == set()
        assert (rig.n_places(), rig.cache.usage().bytes_used) == (0, 0)


@in_loop
async def test_a_lost_truncation_leaves_the_session_as_long_as_it_was() -> None:
    log = FailingLog(nth(0, Truncated))
    async with running(log=log) as rig:
        session_id = await rig.open(some_ids(40))
        with pytest.raises(StepFailed):
            await rig.engine.truncate(Truncate(session_id=session_id, to=7))
        assert not rig.engine.registry.is_busy(session_id)
        await assert_goes_on(rig, session_id, some_ids(40))


@in_loop
async def test_a_lost_deletion_is_told_and_made_up_for() -> None:
    log = FailingLog(nth(0, Deleted))
    async with running(log=log) as rig:
        session_id = await rig.open([1])
        with pytest.raises(StepFailed):
            await rig.engine.delete(session_id)
        await rig.settled()
        assert rig.n_places() == 0
        await eventually(lambda: session_id not in log.sessions)  # a restart would bring it back


@in_loop
async def test_a_log_that_fails_for_good_ends_requests_and_not_the_engine() -> None:
    log = FailingLog(lambda batch: False)
    async with running(log=log) as rig:
        session_id = await rig.open(some_ids(5))
        log.when = lambda batch: True
        for _ in range(3):
            await failed(rig.append(session_id, [1]))
            await failed(rig.generate(session_id, 3, atomic=False))
            with pytest.raises(StepFailed):
                await rig.open([1, 2])
        log.when = lambda batch: False
        await rig.settled()
        assert rig.places() == {session_id}
        await assert_goes_on(rig, session_id, some_ids(5))


@in_loop
async def test_a_restarted_engine_finds_what_was_kept() -> None:
    class Unclosed(FailingLog):
        def close(self) -> None:
            """The next engine reads it."""

    log = Unclosed(lambda batch: False)
    async with running(log=log) as rig:
        session_id, gone = await rig.open(some_ids(5)), await rig.open([1])
        await rig.appended(session_id, [7])
        await rig.engine.delete(gone)
    async with running(log=log) as rig:
        assert rig.engine.view(session_id).kv == "evicted"
        with pytest.raises(SessionNotFound):
            rig.engine.view(gone)
        await assert_goes_on(rig, session_id, [*some_ids(5), 7])


@in_loop
async def test_every_ending_is_observed_once() -> None:
    observer = Counting()
    double = partial(Failing, when=steps_token(POISON))
    log = FailingLog(nth(2, Committed))
    async with running(double, observer=observer, log=log) as rig:
        session_id = await rig.open([1])
        await rig.generated(session_id, 3, ignore_eos=True)
        await failed(rig.append(session_id, [POISON]))
        await failed(rig.generate(session_id, 30, atomic=False, ignore_eos=True))
        await rig.settled()
    told = [(one.kind, one.reason, one.n_prompt, one.n_generated) for one in observer.ended]
    assert told[:3] == [
        ("open", "done", 1, 0),
        ("generate", "length", 0, 3),
        ("append", "StepFailed", 1, 0),
    ]
    assert [(kind, reason) for kind, reason, *_ in told[3:]] == [("generate", "StepFailed")]

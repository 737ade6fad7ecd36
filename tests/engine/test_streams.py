"""When records come, and what is left when nobody wants them any more."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

from engine.errors import Cancelled, Drained, SessionDeleted
from engine.events import Done, Failed, Progress, StepRecord
from engine.reply import Reply
from model.points import Point
from sessions.errors import SessionNotFound
from sessions.log import Entry
from tests.engine.doubles import Counting, FailingLog, Gated
from tests.engine.rig import (
    capture,
    ended,
    eventually,
    gate,
    happened,
    ids_of,
    in_loop,
    running,
    some_ids,
)
from tests.sessions.clock import Clock

HIDDEN = capture(Point("resid_post", 0), Point("ln_f"))


async def next_records(reply: Reply) -> Sequence[StepRecord]:
    event = await anext(reply)
    assert isinstance(event, Progress), event
    return event.records


async def last(reply: Reply) -> tuple[list[StepRecord], Done | Failed]:
    """What is still to come."""
    records: list[StepRecord] = []
    async for event in reply:
        if not isinstance(event, Progress):
            return records, event
        records.extend(event.records)
    raise AssertionError("a reply without a terminal event")


@in_loop
async def test_record_n_arrives_before_step_n_plus_1_is_computed() -> None:
    async with running(partial(Gated, open_passes=1)) as rig:
        session_id = await rig.open(some_ids(4))
        reply = rig.generate(session_id, 6, atomic=False, ignore_eos=True)
        for n in range(6):
            gate(rig).let(1)
            (record,) = await next_records(reply)
            assert (record.index, record.position) == (n, 4 + n)
            assert len(rig.model.passes) == 1 + n + 1
            assert rig.length(session_id) == 5 + n  # told only after it was kept
        assert isinstance(await anext(reply), Done)


@in_loop
async def test_an_appends_chunk_arrives_before_the_next_and_is_not_cut_into_steps() -> None:
    async with running(Gated, prefill_chunk=16) as rig:
        session_id = await rig.open()
        token_ids = some_ids(40)
        reply = rig.append(session_id, token_ids, atomic=False, capture=HIDDEN)
        for n, (start, stop) in enumerate([(0, 16), (16, 32), (32, 40)], start=1):
            gate(rig).let(1)
            records = await next_records(reply)
            assert [r.position for r in records] == list(range(start, stop))
            assert ids_of(records) == token_ids[start:stop]
            assert rig.model.passes == [[range(a, min(a + 16, 40))] for a in range(0, 16 * n, 16)]
        assert isinstance(await anext(reply), Done)


@in_loop
async def test_an_atomic_answer_commits_once_after_its_last_step() -> None:
    batches: list[Sequence[Entry]] = []

    def count(batch: Sequence[Entry]) -> bool:
        batches.append(batch)
        return False

    log = FailingLog(count)
    async with running(log=log, prefill_chunk=4) as rig:
        session_id = await rig.open([1])
        del batches[:]
        done = await rig.appended(session_id, some_ids(10))
        assert len(batches) == 1
        assert len(done.records) == 10
        await rig.generated(session_id, 5, ignore_eos=True)
        assert len(batches) == 2
        await ended(rig.append(session_id, some_ids(10), atomic=False))
        assert len(batches) == 5
        await ended(rig.generate(session_id, 5, ignore_eos=True, atomic=False))
        assert len(batches) == 10


@in_loop
async def test_a_long_prompt_holds_up_nobody_for_more_than_a_chunk() -> None:
    async with running(partial(Gated, open_passes=2), prefill_chunk=8) as rig:
        a, b = await rig.open([1]), await rig.open()
        talk = rig.generate(a, 100, atomic=False, ignore_eos=True)
        await next_records(talk)
        prompt = rig.append(b, some_ids(120))
        rig.model.release()
        await prompt.result()
        mixed = [rows for rows in rig.model.passes if len(rows) == 2]
        assert len(mixed) >= 14  # every chunk but perhaps the first had a mate in its pass
        assert all(sorted(map(len, rows)) == [1, 8] for rows in mixed)
        talk.cancel()
        await last(talk)


@in_loop
async def test_several_prompts_share_one_budget_and_all_get_on() -> None:
    observer = Counting()
    async with running(prefill_chunk=10, max_rows=3, observer=observer) as rig:
        sessions = [await rig.open() for _ in range(5)]
        done = await asyncio.gather(*[rig.appended(s, some_ids(23)) for s in sessions])
        assert all(len(one.records) == 23 for one in done)
        assert all(rows <= 3 and tokens <= 10 for rows, tokens in observer.tokens)
        assert sum(tokens for _, tokens in observer.tokens) == 5 * 23
        assert [one.n_prompt for one in observer.ended] == [23] * 5


@pytest.mark.parametrize("kind", ["generate", "append"])
@in_loop
async def test_more_sessions_than_rows_take_turns(kind: str) -> None:
    """Two of five fit a pass. Nobody is ever two turns ahead of another."""
    async with running(partial(Gated, open_passes=5), max_rows=2, prefill_chunk=8) as rig:
        sessions = [await rig.open([i]) for i in range(5)]
        replies = [
            rig.generate(session_id, 12, ignore_eos=True)
            if kind == "generate"
            else rig.append(session_id, some_ids(48))
            for session_id in sessions
        ]
        rig.model.release()
        for reply in replies:
            await reply.result()
        turns = Counter(dict.fromkeys(range(5), 0))  # by slot
        for slots in rig.model.slots[5:]:
            turns.update(slots)
            if max(turns.values()) < 6:  # nobody has finished
                assert max(turns.values()) - min(turns.values()) <= 2


# Nobody reads any more.


@in_loop
async def test_s04_a_cancelled_stream_ends_within_one_step() -> None:
    async with running(partial(Gated, open_passes=3)) as rig:
        session_id = await rig.open(some_ids(4))
        async with rig.generate(session_id, 50, atomic=False, ignore_eos=True) as reply:
            await next_records(reply)
            await next_records(reply)
            await eventually(lambda: len(rig.model.passes) == 3)
        gate(rig).let(1)  # the step that was under way
        records, event = await last(reply)
        assert isinstance(event, Failed)
        assert isinstance(event.error, Cancelled)
        assert records == []
        assert event.session is not None
        assert event.session.past_length == rig.length(session_id) == 6
        assert len(rig.model.passes) <= 4
        rig.model.release()
        await rig.settled()
        assert len(rig.model.passes) <= 4
        assert rig.engine.stats().running == 0


@in_loop
async def test_s02_a_cancelled_plain_answer_leaves_everything_as_before() -> None:
    async with running(partial(Gated, open_passes=4)) as rig:
        session_id = await rig.open(some_ids(4))
        before = rig.session(session_id), rig.cache.usage()
        async with rig.generate(session_id, 100, ignore_eos=True) as reply:
            await eventually(lambda: len(rig.model.passes) == 4)
        rig.model.release()
        _, event = await last(reply)
        assert isinstance(event, Failed)
        assert event.session == before[0]
        await rig.settled()
        assert (rig.session(session_id), rig.cache.usage()) == before
        assert len(rig.model.passes) <= 5
        again = await rig.generated(session_id, 8, capture=HIDDEN)
        other = await rig.generated(await rig.open(before[0].token_ids), 8, capture=HIDDEN)
        assert ids_of(again.records) == ids_of(other.records)
        assert again.usage.rebuilt_tokens == 0


@in_loop
async def test_a_cancelled_open_leaves_no_session_and_no_place() -> None:
    async with running(Gated, prefill_chunk=4) as rig:
        task = asyncio.create_task(rig.open(some_ids(30)))
        await happened(gate(rig).arrived)
        task.cancel()
        rig.model.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.engine._requests.none_left.wait()
        await rig.settled()
        assert len(rig.engine.registry) == 0
        assert (rig.n_places(), rig.cache.usage().bytes_used) == (0, 0)


@in_loop
async def test_s01_streams_closed_after_their_first_event_do_no_harm() -> None:
    async with running() as rig:
        for i in range(40):
            session_id = await rig.open(some_ids(3, seed=i))
            async with rig.generate(session_id, 60, atomic=False, ignore_eos=True) as reply:
                records = list(await next_records(reply))
            more, event = await last(reply)  # cancelled, or at its end already
            assert event.session is not None
            told = [*some_ids(3, seed=i), *ids_of(records + more)]
            assert list(event.session.token_ids) == told == list(rig.session(session_id).token_ids)
            asked = capture(Point("ln_f"))
            done = await rig.appended(session_id, [15496], capture=asked)
            fresh = await rig.appended(await rig.open(told), [15496], capture=asked)
            ours, theirs = (one.records[0].points[Point("ln_f")] for one in (done, fresh))
            assert abs(ours - theirs).max() < 1e-4
            for view in rig.engine.views(limit=9).views:
                await rig.engine.delete(view.session.id)
        assert rig.n_places() == 0


@in_loop
async def test_cancelling_twice_and_after_the_end_is_harmless() -> None:
    async with running() as rig:
        session_id = await rig.open([1])
        reply = rig.append(session_id, [1])
        done = await reply.result()
        reply.cancel()
        reply.cancel()
        await rig.settled()
        assert done.session.past_length == rig.length(session_id) == 2


# A reader who is slow.


@in_loop
async def test_s06_a_row_whose_reader_stopped_is_not_scheduled_and_resumes() -> None:
    observer = Counting()
    async with running(reply_buffer_bytes=8000, observer=observer) as rig:
        slow_id, quick_id = await rig.open([15496]), await rig.open([995])
        slow = rig.generate(slow_id, 100, atomic=False, ignore_eos=True, capture=HIDDEN)
        await slow.started()
        quick = await rig.generated(quick_id, 100, ignore_eos=True)  # others go on
        assert len(quick.records) == 100
        stuck_at = rig.length(slow_id)
        assert 2 < stuck_at < 15
        assert 0 < slow.backlog_bytes <= 8000
        assert observer.tokens[-1] == (1, 1)
        assert not slow.finished
        passes = len(rig.model.passes)
        await rig.appended(quick_id, some_ids(5))
        assert (rig.length(slow_id), len(rig.model.passes)) == (stuck_at, passes + 1)
        records, event = await last(slow)
        assert isinstance(event, Done)
        assert len(records) == 100
        solo = await rig.generated(await rig.open([15496]), 100, ignore_eos=True)
        assert ids_of(records) == ids_of(solo.records)


@in_loop
async def test_one_record_larger_than_the_buffer_still_goes_through() -> None:
    async with running(reply_buffer_bytes=1) as rig:
        session_id = await rig.open()
        done = await ended(rig.append(session_id, some_ids(5), atomic=False, capture=HIDDEN))
        assert len(done.records) == 5
        done = await ended(rig.generate(session_id, 5, atomic=False, ignore_eos=True))
        assert len(done.records) == 5


@in_loop
async def test_a_stuck_reader_can_be_cancelled_and_its_session_used() -> None:
    async with running(reply_buffer_bytes=2000) as rig:
        session_id, mate = await rig.open([1]), await rig.open([1])
        async with rig.generate(session_id, 100, atomic=False, ignore_eos=True) as reply:
            await reply.started()
            await rig.generated(mate, 30, ignore_eos=True)
        _, event = await last(reply)
        assert isinstance(event, Failed)
        length = rig.length(session_id)
        assert (await rig.appended(session_id, [1])).session.past_length == length + 1


# Deletion, time and shutdown.


@in_loop
async def test_x02_deleting_ends_a_stream_and_returns_its_memory_once() -> None:
    async with running(partial(Gated, open_passes=3)) as rig:
        session_id = await rig.open(some_ids(4))
        reply = rig.generate(session_id, 100, atomic=False, ignore_eos=True)
        await next_records(reply)
        deletion = asyncio.create_task(rig.engine.delete(session_id))
        await asyncio.sleep(0)
        with pytest.raises(SessionNotFound):  # out of sight at once
            rig.engine.view(session_id)
        with pytest.raises(SessionNotFound):
            await rig.engine.delete(session_id)
        rig.model.release()
        await deletion
        _, event = await last(reply)
        assert isinstance(event, Failed)
        assert isinstance(event.error, SessionDeleted)
        await rig.settled()
        assert (rig.n_places(), rig.cache.usage().bytes_used) == (0, 0)
        with pytest.raises(SessionNotFound):
            rig.append(session_id, [1])
        rig.check()


@in_loop
async def test_x04_a_session_never_expires_during_a_stream() -> None:
    clock = Clock()
    async with running(partial(Gated, open_passes=2), clock=clock) as rig:
        session_id = await rig.open([1], ttl=1)
        idle = await rig.open(ttl=3)
        reply = rig.generate(session_id, 5, atomic=False, ignore_eos=True)
        await next_records(reply)
        clock.now += 5
        rig.engine.sweep()
        assert [v.session.id for v in rig.engine.views(limit=9).views] == [session_id]
        rig.model.release()
        records, event = await last(reply)
        assert isinstance(event, Done)
        assert len(records) == 4
        assert rig.engine.view_of(event.session).expires == clock.now + 1  # from its end
        clock.now += 0.9
        rig.engine.view(session_id)  # which touches it
        clock.now += 0.9
        rig.engine.sweep()
        assert (await rig.appended(session_id, [1])).session.past_length == 7
        clock.now += 1
        rig.engine.sweep()
        await rig.settled()
        assert rig.places() == set()
        assert idle not in rig.places()
        assert rig.cache.usage().bytes_used == 0


@in_loop
async def test_s11_draining_lets_short_work_finish_and_ends_the_rest() -> None:
    async with running(partial(Gated, open_passes=2)) as rig:
        a, b = await rig.open(some_ids(3)), await rig.open(some_ids(4))
        stream = rig.generate(a, 100, atomic=False, ignore_eos=True)
        plain = rig.append(b, [1, 2])
        drain = asyncio.create_task(rig.engine.drain(0.05))
        await eventually(lambda: rig.engine.admission.draining)
        gate(rig).let(1)
        assert (await next_records(stream))[0].position == 3
        assert (await plain.result()).session.past_length == 6
        await eventually(lambda: len(rig.engine._inbox) > 0)  # the grace period is over
        rig.model.release()
        await drain
        _, event = await last(stream)
        assert isinstance(event, Failed)
        assert isinstance(event.error, Drained)
        assert event.session is not None
        assert event.session.past_length == rig.length(a)


@in_loop
async def test_draining_an_idle_engine_waits_for_nothing() -> None:
    async with running() as rig:
        await rig.engine.drain(1000)


@in_loop
async def test_closing_ends_what_still_runs() -> None:
    async with running(reply_buffer_bytes=2000) as rig:
        session_id = await rig.open([1])
        reply = rig.generate(session_id, 120, atomic=False, ignore_eos=True)
        await next_records(reply)
        await rig.engine.close()
        records, event = await last(reply)
        assert isinstance(event, Failed)
        assert isinstance(event.error, Drained)
        assert rig.length(session_id) == 2 + len(records)
        assert event.session == rig.session(session_id)

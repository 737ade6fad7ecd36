"""Internals of committed steps: read from the cache where it has them, computed where not."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from engine.commands import Probe, Read, Truncate
from engine.errors import (
    NoRoom,
    PastLengthMismatch,
    PositionsOutOfRange,
    SessionDeleted,
    StepFailed,
)
from engine.events import Progress
from model.points import LENS_TOP, Point
from sessions.errors import LengthOutOfRange, SessionNotFound
from sessions.log import Committed, Entry, MemoryLog
from tests.agreement import assert_agrees
from tests.engine.doubles import Failing, FailingLog, Gated, Rows
from tests.engine.editing import assert_looks_like, disguised
from tests.engine.rig import (
    CONFIG,
    LIVELY,
    capture,
    ended,
    gate,
    happened,
    ids_of,
    in_loop,
    pieces,
    running,
    some_ids,
)
from tests.reference import reference_points

NAMES = (
    "embedding",
    "resid_post.*",
    "k.0",
    "v.1",
    "z.1[1]",
    "pattern.0",
    "head_out.1[0]",
    "lens.0",
    "ln_f",
    "logits[3,50256]",
)


@in_loop
async def test_what_is_resident_is_read_and_nothing_is_written() -> None:
    async with running() as rig:
        ids = some_ids(70)
        session_id = await rig.open(ids)
        rig.model.passes.clear()
        usage, places = rig.cache.usage(), rig.places()
        buffers = rig.cache.buffers
        before = buffers.keys.clone(), buffers.values.clone(), buffers.ln_f.clone()
        done = await rig.read(session_id, *NAMES, positions=[0, 1, 2, 31, 32, 69])
        assert [record.position for record in done.records] == [0, 1, 2, 31, 32, 69]
        assert [record.index for record in done.records] == list(range(6))
        assert_looks_like(done.records, ids)
        assert sum(len(row) for rows in rig.model.passes for row in rows) == 6
        assert (done.usage.cached_tokens, done.usage.rebuilt_tokens, done.usage.steps) == (6, 0, 0)
        assert done.session == rig.session(session_id)
        await rig.settled()
        assert (rig.cache.usage(), rig.places()) == (usage, places)
        for old, new in zip(before, (buffers.keys, buffers.values, buffers.ln_f), strict=True):
            assert (old == new).all()


@in_loop
async def test_all_of_a_session_by_default_as_a_stream_or_at_once() -> None:
    async with running(prefill_chunk=16, reply_buffer_bytes=4000) as rig:
        ids = some_ids(50)
        session_id = await rig.open(ids)
        for atomic in (True, False):
            done = await rig.read(session_id, *NAMES, atomic=atomic)
            assert len(done.records) == 50
            assert_looks_like(done.records, ids)


@in_loop
async def test_an_evicted_session_is_computed_again_and_stays_evicted() -> None:
    async with running() as rig:
        ids = some_ids(20)
        session_id = await rig.open(ids)
        rig.engine._thread.places.evict(session_id, "room")
        done = await rig.read(session_id, *NAMES, positions=[3, 11])
        assert_looks_like(done.records, ids)
        assert [record.position for record in done.records] == [3, 11]
        assert (done.usage.rebuilt_tokens, done.usage.cached_tokens) == (12, 0)
        assert rig.engine.view(session_id).kv == "evicted"
        assert session_id not in rig.places()


@in_loop
async def test_what_the_prefix_index_still_has_is_read() -> None:
    async with running() as rig:
        ids = some_ids(70)
        session_id = await rig.open(ids)
        rig.engine._thread.places.evict(session_id, "room")
        done = await rig.read(session_id, *NAMES)
        assert_looks_like(done.records, ids)
        assert (done.usage.cached_tokens, done.usage.rebuilt_tokens) == (64, 6)


@pytest.mark.parametrize("evicted", [False, True])
@in_loop
async def test_edited_steps_are_read_with_their_edits(evicted: bool) -> None:
    async with running() as rig:
        ids = some_ids(12)
        session_id = await rig.open(ids[:4])
        await rig.appended(session_id, ids[4:], interventions=(disguised(7, (6, 8)),))
        if evicted:
            rig.engine._thread.places.evict(session_id, "room")
        done = await rig.read(session_id, *NAMES)
        assert_looks_like(done.records, [*ids[:6], 7, 7, *ids[8:]])
        assert [record.position for record in done.records if record.edits] == [6, 7]


@in_loop
async def test_logprobs_and_the_lens_of_past_steps() -> None:
    async with running() as rig:
        ids = some_ids(9)
        session_id = await rig.open(ids)
        done = await rig.read(session_id, "lens.*", positions=[0, 4, 8], top_logprobs=2)
        expected = reference_points(LIVELY, ids)
        assert done.records[0].logprob is None
        for record in done.records:
            if record.position:
                row = expected["logits"][record.position - 1].double().log_softmax(-1)
                assert record.logprob == pytest.approx(float(row[record.token_id]), abs=1e-3)
            last = record.points[Point("lens", CONFIG.n_layer - 1)]
            assert last.shape == (2, LENS_TOP)
            assert_agrees(
                last[1], np.sort(expected["logits"][record.position].numpy())[::-1][:LENS_TOP]
            )
            assert_agrees(last[1], expected["logits"][record.position].numpy()[last[0].astype(int)])


@in_loop
async def test_a_session_at_work_is_read_as_its_last_commit_left_it() -> None:
    async with running(Gated) as rig:
        gate(rig).let(1)
        ids = some_ids(5)
        session_id = await rig.open(ids)
        append = rig.append(session_id, [1] * 60)
        read = rig.engine.read(Read(session_id=session_id, capture=capture(*rig.points(*NAMES))))
        gate(rig).release()
        done = await ended(read)
        assert len(done.records) == 5
        assert_looks_like(done.records, ids)
        assert len((await ended(append)).records) == 60


@in_loop
async def test_a_read_that_began_before_a_truncate_sees_what_was_there() -> None:
    async with running(Gated) as rig:
        gate(rig).let(1)
        ids = some_ids(40)
        session_id = await rig.open(ids)
        read = rig.engine.read(Read(session_id=session_id, capture=capture(*rig.points(*NAMES))))
        await happened(gate(rig).arrived)
        gate(rig).release()
        await rig.engine.truncate(Truncate(session_id=session_id, to=5))
        await rig.appended(session_id, some_ids(40, seed=5))
        assert_looks_like((await ended(read)).records, ids)


@in_loop
async def test_fresh_uses_nothing_that_is_cached() -> None:
    async with running() as rig:
        ids = some_ids(70)
        session_id = await rig.open(ids)
        place = rig.engine._thread.places._places[session_id]
        rig.cache.buffers.keys[0, place.slots[0], 0, 3] += 0.5
        cached = await rig.read(session_id, "k.0", "ln_f")
        fresh = await rig.read(session_id, "k.0", "ln_f", fresh=True)
        assert fresh.usage.rebuilt_tokens == 70
        assert_looks_like(fresh.records, ids)
        k = Point("k", 0)
        wrong = [
            i
            for i, (a, b) in enumerate(zip(cached.records, fresh.records, strict=True))
            if np.abs(a.points[k] - b.points[k]).max() > 1e-3
        ]
        assert wrong == [3]


@in_loop
async def test_refusals() -> None:
    async with running() as rig:
        session_id = await rig.open([1, 2, 3])
        with pytest.raises(PositionsOutOfRange):
            await rig.read(session_id, "ln_f", positions=[3])
        with pytest.raises(PastLengthMismatch):
            await rig.read(session_id, "ln_f", past_length=2)
        with pytest.raises(SessionNotFound):
            await rig.read("sess_0", "ln_f")
        with pytest.raises(SessionNotFound):
            await rig.read(session_id, "ln_f", owner="somebody else")


@in_loop
async def test_a_reader_that_leaves_ends_the_work_and_frees_the_branch() -> None:
    async with running(Gated) as rig:
        gate(rig).let(1)
        session_id = await rig.open(some_ids(40))
        read = rig.engine.read(Read(session_id=session_id, capture=capture(Point("ln_f"))))
        await happened(gate(rig).arrived)
        read.cancel()
        gate(rig).release()
        await rig.settled()
        assert rig.places() == {session_id}


@in_loop
async def test_a_slow_reader_of_a_stream_is_waited_for() -> None:
    async with running(reply_buffer_bytes=3000) as rig:
        session_id = await rig.open(some_ids(60))
        read = rig.engine.read(
            Read(session_id=session_id, capture=capture(*rig.points("resid_post.*")), atomic=False)
        )
        async with read:
            async for event in read:
                assert isinstance(event, Progress)
                break
            await rig.appended(await rig.open([5]), [6] * 20)  # others go on
            assert read.backlog_bytes <= 3000


def reads_again(rows: Rows) -> bool:
    return any(row.reads_again for row in rows)


@in_loop
async def test_a_failing_read_leaves_everything_as_it_was() -> None:
    log = MemoryLog()
    async with running(lambda model: Failing(model, reads_again), log=log) as rig:
        ids = some_ids(60)
        session_id = await rig.open(ids)
        with pytest.raises(StepFailed):
            await rig.read(session_id, "ln_f")
        await rig.settled()
        assert rig.places() == {session_id}
        assert [session.id for session in log.load()] == [session_id]
        done = await rig.appended(session_id, [1], capture=capture(Point("ln_f")))
        assert_looks_like(done.records, [*ids, 1])


@pytest.mark.parametrize("atomic", [True, False])
@in_loop
async def test_a_log_that_fails_is_no_concern_of_a_read_beside(atomic: bool) -> None:
    def refused(entries: Sequence[Entry]) -> bool:
        return any(isinstance(one, Committed) and 7 in one.token_ids for one in entries)

    async with running(Gated, log=FailingLog(refused)) as rig:
        gate(rig).let(2)
        ids = some_ids(6)
        session_id, other = await rig.open(ids), await rig.open([1])
        going = rig.generate(session_id, 40, ignore_eos=True)
        await happened(gate(rig).arrived)
        lost = rig.append(other, [7])
        read = rig.engine.read(
            Read(session_id=session_id, capture=capture(Point("ln_f")), atomic=atomic)
        )
        gate(rig).release()
        with pytest.raises(StepFailed):
            await ended(lost)
        assert_looks_like((await ended(read)).records, ids)
        generated = ids_of((await ended(going)).records)
        done = await rig.appended(session_id, [5], capture=capture(Point("ln_f")))
        assert len(generated) == 40
        assert_looks_like(done.records, [*ids, *generated, 5])


@in_loop
async def test_deleting_a_session_ends_what_reads_it() -> None:
    async with running(Gated) as rig:
        gate(rig).let(1)
        session_id = await rig.open(some_ids(40))
        seen = capture(Point("ln_f"))
        read = rig.engine.read(Read(session_id=session_id, capture=seen, atomic=False))
        probe = rig.engine.probe(Probe(session_id=session_id, at=40, token_ids=(1,), capture=seen))
        await happened(gate(rig).arrived)
        deleted = asyncio.create_task(rig.engine.delete(session_id))
        await asyncio.sleep(0)
        gate(rig).release()
        await deleted
        for reply in (read, probe):
            with pytest.raises(SessionDeleted):
                await ended(reply)
        await rig.settled()
        assert not rig.places()


@pytest.mark.parametrize("names", [("logits",), ("lens.*", "logits"), ("pattern.0",)])
@in_loop
async def test_steps_that_nobody_sees_do_not_make_passes_shorter(names: tuple[str, ...]) -> None:
    async with running() as rig:
        ids = some_ids(120)
        seen = capture(*rig.points(*names), positions=frozenset({119}))
        done = await rig.probe(token_ids=tuple(ids), capture=seen, atomic=False)
        assert_looks_like(done.records, ids)
        assert [len(row) for rows in rig.model.passes for row in rows] == [120]


@pytest.mark.parametrize("edited", [True, False])
@in_loop
async def test_edited_probes_leave_nothing_to_be_found(edited: bool) -> None:
    async with running() as rig:
        ids = tuple(some_ids(70))
        interventions = (disguised(7, (3, 4)),) if edited else ()
        seen = capture(Point("ln_f"), positions=frozenset({69}))
        await rig.probe(token_ids=ids, interventions=interventions, capture=seen)
        await rig.settled()
        assert rig.cache.usage().bytes_cached == (0 if edited else pieces(2))


@in_loop
async def test_a_fresh_read_that_finds_no_room_says_so() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        session_id = await rig.open(some_ids(60))
        busy = rig.append(session_id, [1] * 60, atomic=False)
        with pytest.raises(NoRoom):
            await rig.read(session_id, "ln_f", fresh=True)
        await ended(busy)
        assert rig.length(session_id) == 120


@in_loop
async def test_a_probe_replays_a_tail_and_is_gone() -> None:
    log = MemoryLog()
    async with running(log=log) as rig:
        ids = some_ids(20)
        session_id = await rig.open(ids)
        seen = capture(*rig.points(*NAMES), positions=frozenset({19}))
        rig.model.passes.clear()
        done = await rig.probe(
            session_id=session_id,
            at=12,
            stop=20,
            interventions=(disguised(7, (12, 13)),),
            capture=seen,
        )
        assert sum(len(row) for rows in rig.model.passes for row in rows) == 8
        assert_looks_like(done.records, [*ids[:12], 7, *ids[13:]])
        assert [record.position for record in done.records] == [19]
        await rig.settled()
        assert rig.places() == {session_id}
        assert len(log.load()) == 1
        assert len(rig.engine.registry) == 1


@in_loop
async def test_a_probe_from_nothing() -> None:
    async with running() as rig:
        ids = some_ids(20)
        seen = capture(*rig.points(*NAMES))
        first = await rig.probe(token_ids=tuple(ids), capture=seen)
        assert_looks_like(first.records, ids)
        await rig.settled()
        assert not rig.places()
        with pytest.raises(LengthOutOfRange):
            rig.engine.probe(
                Probe(session_id=await rig.open([1]), at=2, token_ids=(1,), capture=seen)
            )

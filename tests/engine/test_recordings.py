from collections.abc import Sequence

import numpy as np
import pytest

from engine.commands import Open, Read, Truncate
from engine.errors import StepFailed
from engine.events import Done, Progress, Recorded, StepRecord
from engine.recordings import Recordings
from model.points import Point
from sessions.log import Committed, Entry
from tests.engine.doubles import Failing, FailingLog, steps_token
from tests.engine.editing import assert_looks_like, disguised
from tests.engine.rig import Rig, capture, in_loop, running, some_ids

LN_F, Z = Point("ln_f"), Point("z", 0)
BYTES = 4 * (8 + 2 * 4)


def step(position: int, fill: float = 1.0) -> Recorded:
    points = {
        LN_F: np.full(8, fill, np.float32),
        Z: np.arange(8, dtype=np.float32).reshape(2, 4) + fill,
    }
    return Recorded(position, points)


def kept(recordings: Recordings, session_id: str, n: int) -> list[int]:
    """Which of the first `n` positions are there."""
    return [p for p in range(n) if recordings.find(session_id, [LN_F], [p]) is not None]


def test_what_was_recorded_is_found_whole_or_in_units_or_not_at_all() -> None:
    recordings = Recordings(1000)
    recordings.keep("a", 3, [step(0), step(1), step(2, 5.0)])
    found = recordings.find("a", [LN_F, Point("z", 0, (1,))], [2, 0])
    assert found is not None
    assert [float(points[LN_F][0]) for points in found] == [5.0, 1.0]
    assert found[1][Point("z", 0, (1,))].tolist() == [[5, 6, 7, 8]]
    assert recordings.find("a", [Point("z", 1)], [0]) is None
    assert recordings.find("a", [LN_F], [3]) is None
    assert recordings.find("b", [LN_F], [0]) is None
    recordings.check()


def test_what_is_rolled_back_is_dropped() -> None:
    recordings = Recordings(1000)
    recordings.keep("a", 3, [step(0), step(1), step(2)])
    recordings.keep("a", 1, [])
    assert kept(recordings, "a", 3) == [0]
    assert recordings.n_bytes == BYTES
    recordings.keep("a", 0, [])
    assert recordings.n_bytes == 0
    recordings.check()


def test_the_session_used_longest_ago_makes_room_and_one_alone_keeps_its_first_steps() -> None:
    recordings = Recordings(3 * BYTES)
    recordings.keep("a", 1, [step(0)])
    recordings.keep("b", 1, [step(0)])
    assert kept(recordings, "a", 1) == [0]  # used: b is older now
    recordings.keep("c", 2, [step(0), step(1)])
    assert [kept(recordings, name, 2) for name in "abc"] == [[0], [], [0, 1]]
    recordings.keep("c", 5, [step(2), step(3), step(4)])
    assert [kept(recordings, name, 5) for name in "abc"] == [[], [], [0, 1, 2]]
    recordings.check()


def test_branches_share_and_outlive_each_other() -> None:
    recordings = Recordings(1000)
    recordings.keep("a", 3, [step(0), step(1), step(2)])
    recordings.branch("b", "a", 2)
    assert recordings.n_bytes == 3 * BYTES
    recordings.keep("a", 0, [])
    assert (kept(recordings, "a", 3), kept(recordings, "b", 3)) == ([], [0, 1])
    assert recordings.n_bytes == 2 * BYTES
    recordings.check()
    recordings.forget("b")
    recordings.forget("b")
    assert recordings.n_bytes == 0
    recordings.check()


def test_what_is_on_its_way_is_bounded_too() -> None:
    recordings = Recordings(2 * BYTES)
    assert recordings.take(BYTES)
    assert recordings.take(BYTES)
    assert not recordings.take(BYTES)
    recordings.give_back([step(0)])
    assert recordings.take(BYTES)
    recordings.arrive([step(0), step(1)])
    assert recordings.take(2 * BYTES)


def test_a_step_that_cannot_fit_costs_nobody_anything() -> None:
    recordings = Recordings(2 * BYTES)
    recordings.keep("a", 1, [step(0)])
    recordings.keep("b", 3, [step(0), step(1), step(2)])
    assert [kept(recordings, name, 3) for name in "ab"] == [[], [0, 1]]
    recordings.keep("c", 1, [Recorded(0, {LN_F: np.zeros(3 * BYTES, np.float32)})])
    assert [kept(recordings, name, 3) for name in "bc"] == [[0, 1], []]
    recordings.check()


async def recording(rig: Rig, ids: list[int]) -> str:
    command = Open(token_ids=tuple(ids), ttl_seconds=60, record=rig.points("ln_f", "z.*", "logits"))
    return (await rig.engine.open(command)).session.id


def recorded(rig: Rig, session_id: str, *names: str) -> tuple[StepRecord, ...] | None:
    rig.engine.recordings.check()
    command = Read(session_id=session_id, capture=capture(*rig.points(*names)))
    return rig.engine.recorded(command)


@in_loop
async def test_a_recording_session_is_read_without_compute() -> None:
    async with running() as rig:
        ids = some_ids(40)
        twin = await rig.open(ids)  # its rows could be found, but would show nothing
        session_id = await recording(rig, ids)
        done = await rig.appended(
            session_id,
            [5, 6],
            capture=capture(Point("wte")),
            interventions=(disguised(9, (40, 41)),),
        )
        assert set(done.records[0].points) == {Point("wte")}
        rig.engine._thread.places.evict(session_id, "room")
        rig.model.passes.clear()
        records = recorded(rig, session_id, "ln_f", "z.1[0]", "logits[7]")
        assert records is not None
        assert not rig.model.passes
        assert len(records) == 42
        assert_looks_like(records, [*ids, 9, 6])
        assert [len(record.edits) for record in records[39:]] == [0, 1, 0]
        assert recorded(rig, session_id, "q.0") is None
        assert recorded(rig, twin, "ln_f") is None


@in_loop
async def test_branches_truncates_and_deletes_keep_recordings_true() -> None:
    async with running() as rig:
        ids = some_ids(10)
        parent = await recording(rig, ids)
        child = await rig.fork(parent, 6, [1, 2])
        await rig.engine.truncate(Truncate(session_id=parent, to=3))
        await rig.appended(parent, [7, 8], atomic=False)
        for session_id, history in ((parent, [*ids[:3], 7, 8]), (child, [*ids[:6], 1, 2])):
            records = recorded(rig, session_id, "ln_f", "logits[1,2]")
            assert records is not None
            assert [record.token_id for record in records] == history
            assert_looks_like(records, history)
        await rig.engine.delete(parent)
        await rig.engine.delete(child)
        assert rig.engine.recordings.n_bytes == 0


@in_loop
async def test_a_fork_that_fails_leaves_no_recording() -> None:
    async with running(lambda model: Failing(model, steps_token(7))) as rig:
        parent = await recording(rig, some_ids(4))
        with pytest.raises(StepFailed):
            await rig.fork(parent, 2, [7])
        rig.engine.recordings.check()
        await rig.engine.delete(parent)
        assert rig.engine.recordings.n_bytes == 0


@pytest.mark.parametrize("atomic", [True, False])
@in_loop
async def test_what_is_recorded_rides_on_no_event_that_a_slow_reader_has(atomic: bool) -> None:
    async with running(record_bytes=300_000) as rig:
        session_id = await recording(rig, [1])
        reply = rig.append(session_id, some_ids(100), atomic=atomic)
        await rig.settled()
        assert not rig.engine._requests._requests
        async for event in reply:
            assert isinstance(event, Progress | Done)
            assert not event.recorded
        assert rig.engine.recordings.n_bytes <= 300_000
        assert recorded(rig, session_id, "ln_f") is None
        assert rig.engine.recordings.take(300_000)  # nothing is on its way any more
        asked = Read(
            session_id=session_id, capture=capture(Point("ln_f"), positions=frozenset({0}))
        )
        assert rig.engine.recorded(asked) is not None


@in_loop
async def test_what_fails_or_is_lost_is_not_on_its_way_for_ever() -> None:
    def refused(entries: Sequence[Entry]) -> bool:
        return any(isinstance(one, Committed) and 9 in one.token_ids for one in entries)

    log = FailingLog(refused)
    async with running(lambda model: Failing(model, steps_token(7)), log=log) as rig:
        session_id = await recording(rig, [1])
        for last in (7, 9):
            for atomic in (True, False):
                with pytest.raises(StepFailed):
                    await rig.appended(session_id, [1, 2, last], atomic=atomic)
                length = rig.length(session_id)
                await rig.engine.truncate(Truncate(session_id=session_id, to=min(length, 1)))
        await rig.settled()
        assert rig.engine.recordings.take(rig.engine.recordings.max_bytes)

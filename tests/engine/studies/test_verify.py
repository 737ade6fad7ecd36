"""Verify against the real engine: clean where the cache is, and not fooled where it is not."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest

from engine.commands import Capture, Read
from engine.studies.measures import LOGITS
from engine.studies.verify import Verification, verified_points, verify
from model.points import Point
from tests.agreement import tolerance
from tests.engine.editing import disguised
from tests.engine.rig import CONFIG, Rig, in_loop, running, some_ids

KEYS = {"embedding", "ln_f", "logits"} | {
    f"{name}.{layer}" for name in ("k", "v", "resid_post") for layer in range(CONFIG.n_layer)
}


async def verified(
    rig: Rig, session_id: str, positions: Sequence[int], *names: str
) -> Verification:
    points = rig.points(*names) if names else verified_points(CONFIG)
    capture = Capture(points=points, positions=frozenset(positions))
    command = Read(session_id=session_id, capture=capture, atomic=False)
    return await verify(rig.engine, command)


def assert_clean(found: Verification, *, exactly: bool = False) -> None:
    assert {str(point) for point in found.worst} == KEYS
    worst = max(one.gap.absolute for one in found.worst.values())
    assert worst <= (0 if exactly else float(tolerance([10.0])[0]))
    assert found.greedy_equal is True


@pytest.mark.parametrize("exact", [False, True])
@in_loop
async def test_a_cached_path_is_what_a_full_pass_gives(exact: bool) -> None:
    async with running(exact=exact, prefill_chunk=16, reply_buffer_bytes=300_000) as rig:
        session_id = await rig.open(some_ids(5))
        await rig.appended(session_id, some_ids(30, seed=1))
        await rig.generated(session_id, 7)
        child = await rig.fork(session_id, 33, some_ids(4, seed=2))
        for one in (session_id, child):
            length = rig.length(one)
            found = await verified(rig, one, range(length))
            assert_clean(found, exactly=exact)
            assert found.usage.cached_tokens == length


@in_loop
async def test_edited_steps_and_evicted_sessions_are_what_they_were() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(4))
        await rig.appended(session_id, some_ids(8), interventions=(disguised(7, (6, 8)),))
        assert_clean(await verified(rig, session_id, range(12)))
        rig.engine._thread.places.evict(session_id, "room")
        found = await verified(rig, session_id, range(12))
        assert_clean(found)
        assert found.usage.rebuilt_tokens == 12


@pytest.mark.parametrize("number", [3.0, math.nan])
@in_loop
async def test_a_corrupted_cached_key_is_seen_and_where_it_is(number: float) -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(20))
        slot = rig.engine._thread.places._places[session_id].slots[0]
        kept = float(rig.cache.buffers.keys[1, slot, 0, 9, 5])
        rig.cache.buffers.keys[1, slot, 0, 9, 5] = number
        found = await verified(rig, session_id, range(20), "k.*", "v.*", "resid_post.*")
        worst = {str(point): one for point, one in found.worst.items()}
        assert (worst["k.1"].position, worst["k.1"].gap.index) == (9, (0, 5))
        expected = abs(kept - number) if math.isfinite(number) else math.inf
        assert worst["k.1"].gap.absolute == pytest.approx(expected, rel=1e-4)
        assert max(worst[name].gap.absolute for name in ("k.0", "v.0", "v.1")) < 1e-4
        later = worst["resid_post.1"]  # its reader is layer 1, from its position on
        assert later.gap.absolute > 1e-3
        assert later.position is not None
        assert later.position >= 9
        rig.cache.buffers.keys[1, slot, 0, 9, 5] = kept


@in_loop
async def test_a_corrupted_ln_f_row_changes_the_greedy_id_of_its_position_only() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(20))
        slot = rig.engine._thread.places._places[session_id].slots[0]
        rig.cache.buffers.ln_f[slot, 13] *= -1
        found = await verified(rig, session_id, range(20))
        assert found.greedy_equal is False
        assert found.worst[LOGITS].position == 13
        assert found.worst[Point("ln_f")].position == 13
        assert (await verified(rig, session_id, range(13))).greedy_equal is True


@in_loop
async def test_without_logits_nothing_is_said_of_greedy_ids() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(3))
        found = await verified(rig, session_id, [1], "resid_post.0")
        assert found.greedy_equal is None
        assert list(map(str, found.worst)) == ["resid_post.0"]


@in_loop
async def test_without_positions_nothing_is_read() -> None:
    async with running() as rig:
        session_id = await rig.open()
        assert_clean(await verified(rig, session_id, []), exactly=True)
        assert not rig.model.passes


@in_loop
async def test_others_go_on_between_its_slices() -> None:
    async with running(prefill_chunk=8) as rig:
        session_id, other = await rig.open(some_ids(100)), await rig.open(some_ids(3))
        rig.model.passes.clear()
        verifying = asyncio.create_task(verified(rig, session_id, range(100)))
        await rig.generated(other, 20)
        assert_clean(await verifying)
        longest = max(len(row) for rows in rig.model.passes for row in rows)
        assert longest <= 8
        assert rig.length(other) == 23


@in_loop
async def test_leaving_ends_both_reads() -> None:
    async with running(prefill_chunk=8) as rig:
        session_id = await rig.open(some_ids(100))
        rig.model.passes.clear()
        task = asyncio.create_task(verified(rig, session_id, range(100)))
        while not rig.model.passes:  # noqa: ASYNC110  # another thread makes it true
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.settled()
        assert rig.places() == {session_id}


def test_the_points_of_a_cached_path() -> None:
    assert {str(point) for point in verified_points(CONFIG)} == KEYS
    assert np.all([point.is_head_product == (point == LOGITS) for point in verified_points(CONFIG)])

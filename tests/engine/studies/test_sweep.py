"""Grids of branches against full edited passes of the reference, cell by cell."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
import pytest
import torch

from engine.commands import Truncate
from engine.errors import SessionChanged, SessionDeleted, StepFailed
from engine.studies.guard import Guard
from engine.studies.sweep import Cell, Readout, Sweep
from model.points import Point
from sessions.edits import Edit, Intervention
from tests.agreement import assert_agrees
from tests.engine.doubles import Failing, Gated, steps_position
from tests.engine.editing import value
from tests.engine.rig import LIVELY, Rig, gate, happened, in_loop, running, some_ids
from tests.reference import reference_points

CLEAN, CORRUPT = some_ids(9, seed=1), some_ids(9, seed=2)
LOGITS = Point("logits", units=(11, 318))


async def begun(rig: Rig, session_id: str, *, n_cells: int, at: int) -> Sweep:
    guard = Guard(rig.session(session_id), at + 1, partial(rig.session, session_id))
    readout = Readout(guard=guard, points=(LOGITS,), at=at)
    baseline = await readout.record(rig.engine)
    return Sweep(rig.engine, readout, baseline, n_cells=n_cells)


async def run_through(
    sweep: Sweep, cells: Iterable[Cell], at_five: Callable[[], Awaitable[object]] | None = None
) -> list[int]:
    """How many were done, each time; `at_five`: what happens when five are."""
    told = []
    async with aclosing(sweep.run(cells)) as counts:
        async for count in counts:
            told.append(count)
            if count == 5 and at_five is not None:
                await at_five()
    return told


async def swept(rig: Rig, session_id: str, cells: Sequence[Cell], *, at: int) -> Sweep:
    sweep = await begun(rig, session_id, n_cells=len(cells), at=at)
    assert await run_through(sweep, cells) == list(range(1, len(cells) + 1))
    return sweep


def cell(position: int, edit: Edit) -> Cell:
    return Cell(
        start=position,
        interventions=(Intervention(edit=edit, spans=((position, position + 1),)),),
    )


def patched(point: Point, position: int, source: dict[str, torch.Tensor]) -> Edit:
    row = point.select(source[str(point.whole)][position].numpy())
    return Edit(point=str(point), op="replace", value=value(row))


@pytest.mark.parametrize("at", [8, 5])
@in_loop
async def test_patching_the_residual_gives_the_grid_of_full_passes(at: int) -> None:
    source = reference_points(LIVELY, CLEAN)
    places = [(Point("resid_pre", layer), p) for layer in range(2) for p in range(9)]
    await assert_grid(places, source, at=at)


@in_loop
async def test_patching_each_head_gives_the_grid_of_full_passes() -> None:
    source = reference_points(LIVELY, CLEAN)
    heads = [Point("z", layer, (head,)) for layer in range(2) for head in range(2)]
    await assert_grid([(point, p) for point in heads for p in (0, 4, 8)], source, at=8)


async def assert_grid(
    places: Sequence[tuple[Point, int]], source: dict[str, torch.Tensor], *, at: int
) -> None:
    async with running() as rig:
        session_id = await rig.open(CORRUPT)
        plain = reference_points(LIVELY, CORRUPT)["logits"][at, [11, 318]]
        cells = [cell(p, patched(point, p, source)) for point, p in places]
        rig.model.passes.clear()
        sweep = await swept(rig, session_id, cells, at=at)
        different = 0
        for (point, p), told in zip(places, sweep.arrays[LOGITS], strict=True):
            edits = {p: (patched(point, p, source),)}
            expected = reference_points(LIVELY, CORRUPT, edits=edits)["logits"][at, [11, 318]]
            assert_agrees(told, expected, what=f"{point} at {p}")
            different += not torch.allclose(plain, expected, atol=0.01)
        assert different > len(places) / 3  # the edits do something
        assert sweep.n_steps == sum(at + 1 - p for _, p in places if p <= at)
        assert sum(len(row) for rows in rig.model.passes for row in rows) == sweep.n_steps + 1
        assert max(map(len, rig.model.passes)) > 4  # cells are stepped together
        await rig.settled()
        assert rig.session(session_id).token_ids == tuple(CORRUPT)
        assert rig.places() == {session_id}


@in_loop
async def test_edits_of_the_session_are_kept_and_more_than_one_may_be_made() -> None:
    twice = Edit(point="mlp_out.0", op="scale", scale=2.0)
    none = Edit(point="attn_out.1", op="scale", scale=0.0)
    async with running() as rig:
        session_id = await rig.open(CORRUPT[:4])
        await rig.appended(
            session_id, CORRUPT[4:], interventions=(Intervention(edit=twice, spans=((6, 7),)),)
        )
        everywhere = Cell(
            start=5, interventions=(Intervention(edit=none, spans=((5, 6), (7, None))),)
        )
        sweep = await swept(rig, session_id, [everywhere], at=8)
        edits = {5: (none,), 6: (twice,), 7: (none,), 8: (none,)}
        expected = reference_points(LIVELY, CORRUPT, edits=edits)["logits"][8, [11, 318]]
        assert_agrees(sweep.arrays[LOGITS][0], expected)


@in_loop
async def test_spans_beyond_what_is_looked_at_change_nothing_and_are_no_fault() -> None:
    none = Edit(point="attn_out.1", op="scale", scale=0.0)
    async with running() as rig:
        session_id = await rig.open(CORRUPT)
        wide = Cell(start=2, interventions=(Intervention(edit=none, spans=((2, 3), (7, 9))),))
        sweep = await swept(rig, session_id, [wide], at=4)
        expected = reference_points(LIVELY, CORRUPT, edits={2: (none,)})["logits"][4, [11, 318]]
        assert_agrees(sweep.arrays[LOGITS][0], expected)


@in_loop
async def test_a_grid_larger_than_the_queue_waits_for_its_own_cells() -> None:
    none = Edit(point="attn_out.0", op="scale", scale=0.0)
    async with running(max_queue=3) as rig:
        session_id = await rig.open(CORRUPT)
        cells = [cell(p, none) for p in range(9)] * 3
        sweep = await swept(rig, session_id, cells, at=8)
        thirds = np.split(sweep.arrays[LOGITS], 3)
        for other in thirds[1:]:
            assert_agrees(other, thirds[0])


@in_loop
async def test_a_full_queue_does_not_stop_a_study_that_has_begun() -> None:
    none = Edit(point="attn_out.0", op="scale", scale=0.0)
    async with running(Gated, max_queue=1) as rig:
        gate(rig).let(2)
        session_id, other = await rig.open(CORRUPT), await rig.open([5])
        gate(rig).let(1)
        sweep = await begun(rig, session_id, n_cells=2, at=8)
        reply = rig.append(other, [6])
        gate(rig).release()
        await run_through(sweep, [cell(3, none), cell(4, none)])
        assert sweep.n_steps == 11  # from 3 and from 4 to 8
        await reply.result()


@pytest.mark.parametrize("replaced", [[7], []])
@in_loop
async def test_a_session_that_is_rolled_back_meanwhile_ends_the_study(replaced: list[int]) -> None:
    none = Edit(point="attn_out.0", op="scale", scale=0.0)
    async with running() as rig:
        session_id = await rig.open(CORRUPT)
        sweep = await begun(rig, session_id, n_cells=60, at=8)
        await rig.appended(session_id, [1, 2])  # what comes after is no matter
        cells = [cell(p % 9, none) for p in range(60)]

        async def roll_back() -> None:
            await rig.engine.truncate(Truncate(session_id=session_id, to=8))
            if replaced:
                await rig.appended(session_id, replaced)

        with pytest.raises(SessionChanged):
            await run_through(sweep, cells, roll_back)
        await rig.settled()
        assert rig.places() == {session_id}


@in_loop
async def test_cells_after_the_position_that_is_read_notice_it_too() -> None:
    none = Edit(point="attn_out.0", op="scale", scale=0.0)
    async with running() as rig:
        session_id = await rig.open(CORRUPT)
        sweep = await begun(rig, session_id, n_cells=3, at=4)
        await rig.engine.truncate(Truncate(session_id=session_id, to=4))
        with pytest.raises(SessionChanged):
            await run_through(sweep, [cell(p, none) for p in (6, 7, 8)])


@in_loop
async def test_a_session_that_is_deleted_meanwhile_ends_the_study() -> None:
    none = Edit(point="attn_out.0", op="scale", scale=0.0)
    async with running() as rig:
        session_id = await rig.open(CORRUPT)
        sweep = await begun(rig, session_id, n_cells=60, at=8)
        delete = partial(rig.engine.delete, session_id)
        with pytest.raises(SessionDeleted):
            await run_through(sweep, [cell(p % 9, none) for p in range(60)], delete)
        await rig.settled()
        assert not rig.places()


@in_loop
async def test_leaving_stops_within_a_step_and_keeps_no_branch() -> None:
    none = Edit(point="attn_out.0", op="scale", scale=0.0)
    async with running(Gated) as rig:
        gate(rig).let(1)
        session_id = await rig.open(CORRUPT)
        gate(rig).let(1)
        sweep = await begun(rig, session_id, n_cells=200, at=8)
        gate(rig).arrived.clear()
        counts = sweep.run([cell(0, none)] * 200)
        task = asyncio.create_task(anext(counts))
        await happened(gate(rig).arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        n_passes = len(rig.model.passes)
        gate(rig).release()
        await rig.settled()
        assert len(rig.model.passes) <= n_passes + 1
        assert rig.places() == {session_id}
        assert rig.engine.stats().sessions == 1


@in_loop
async def test_a_cell_that_fails_ends_all_of_them() -> None:
    none = Edit(point="attn_out.0", op="scale", scale=0.0)
    async with running(partial(Failing, when=lambda rows: False)) as rig:
        session_id = await rig.open(CORRUPT)
        sweep = await begun(rig, session_id, n_cells=9, at=8)
        assert isinstance(rig.model, Failing)
        rig.model.when = steps_position(3)
        with pytest.raises(StepFailed):
            await run_through(sweep, [cell(p, none) for p in reversed(range(9))])
        await rig.settled()
        assert rig.places() == {session_id}

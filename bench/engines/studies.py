"""The `Sweep` and `Activations` cases in our engine: `engine.studies`, and reads. The event loop.

Both look at sessions that are there, with their K/V resident.
"""

from contextlib import aclosing

import numpy as np

from bench.cases import Sweep
from engine.commands import Capture, Read
from engine.events import StepRecord
from engine.facade import Engine as Facade
from engine.studies.guard import Guard
from engine.studies.rows import Array
from engine.studies.sweep import Cell, Readout
from engine.studies.sweep import Sweep as Grid
from model.config import GPT2Config
from model.points import Point, parse_points
from sessions.edits import Edit, Intervention, Value


async def swept(facade: Facade, case: Sweep, session_id: str, source_id: str) -> Array:
    """The grid [layer, position, logit]."""
    config, logits = facade.model.config, Point("logits", units=case.logits)

    session = facade.view(session_id).session
    guard = Guard(session, case.n_tokens, lambda: facade.view(session_id).session)
    readout = Readout(guard=guard, points=(logits,), at=case.n_tokens - 1)
    cells = _cells(await _inputs(facade, source_id), config)
    grid = Grid(facade, readout, await readout.record(facade), n_cells=len(cells))
    async with aclosing(grid.run(cells)) as counts:
        async for _ in counts:
            pass
    return grid.arrays[logits].reshape(config.n_layer, case.n_tokens, -1)


async def read_last(facade: Facade, session_id: str, n_tokens: int, *, fresh: bool) -> StepRecord:
    """Every `resid_post` at the last of `n_tokens` positions; `fresh`: all is computed anew."""
    points = parse_points(["resid_post.*"], facade.model.config).points
    capture = Capture(points=points, positions=frozenset([n_tokens - 1]))
    async with facade.read(Read(session_id=session_id, capture=capture, fresh=fresh)) as reply:
        (record,) = (await reply.result()).records
    return record


async def _inputs(facade: Facade, session_id: str) -> tuple[StepRecord, ...]:
    """Each layer's input at every position."""
    capture = Capture(points=parse_points(["resid_pre.*"], facade.model.config).points)
    async with facade.read(Read(session_id=session_id, capture=capture)) as reply:
        return (await reply.result()).records


def _cells(inputs: tuple[StepRecord, ...], config: GPT2Config) -> list[Cell]:
    points = parse_points(["resid_pre.*"], config).points
    return [_cell(point, record) for point in points for record in inputs]


def _cell(point: Point, record: StepRecord) -> Cell:
    row = np.ascontiguousarray(record.points[point], "<f4")
    edit = Edit(point=str(point), op="replace", value=Value(row.shape, row.tobytes()))
    spans = ((record.position, record.position + 1),)
    return Cell(start=record.position, interventions=(Intervention(edit=edit, spans=spans),))

"""One sweep on its way. The event loop.

Whatever can be refused is refused before a stream's first byte:

    SweepPlan ── begin: values and baselines ── RunningSweep ── counts ── message
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.events import StepRecord
from engine.studies.rows import Array
from engine.studies.sweep import Cell, Sight, Sweep
from model.points import Point
from server.host import Service
from server.inputs import Report
from server.interventions.plan import Computed, Planned
from server.interventions.values import resolve
from server.studies.template import Grid, in_template
from server.wire import Message, Tensor, tensor_json

_SLICE = 256
"""Cells whose values are fetched at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What `sight` sees of a session for each cell of `grid`; `plan` has their interventions."""

    sight: Sight
    grid: Grid
    plan: Sequence[Planned]
    follows_source: bool  # `at` means the last position, of the source too

    @property
    def source_id(self) -> str | None:
        """The session that values come from, if they come from one: there is one template."""
        source = self.plan[0].source
        return source.session_id if isinstance(source, Computed) else None

    async def begin(self, service: Service) -> "RunningSweep":
        """Fetch what the cells are edited with and compared to.

        Raises:
            Blamed: a value is not there.
            EngineError, SessionError: refused or failed.
        """
        engine, sight = service.engine, self.sight
        baseline = await sight.record(engine)
        source = await self._source(service)
        cells = await self._cells(service)

        sweep = Sweep(
            engine,
            sight,
            baseline,
            n_cells=len(cells),
            current=lambda: engine.view(sight.session.id).session,
        )
        return RunningSweep(self, sweep, cells, baseline, source)

    async def _source(self, service: Service) -> StepRecord | None:
        """What the source has where the session is looked at; None where it is shorter."""
        if self.source_id is None:
            return None
        session = service.engine.view(self.source_id).session
        at = session.past_length - 1 if self.follows_source else self.sight.at
        if not 0 <= at < session.past_length:
            return None
        return await replace(self.sight, session=session, at=at).record(service.engine)

    async def _cells(self, service: Service) -> list[Cell]:
        cells: list[Cell] = []
        for at in range(0, len(self.plan), _SLICE):
            part = self.plan[at : at + _SLICE]
            with in_template():
                interventions = await resolve(service, part)
            cells += [
                Cell(start=one.first_from(0) or 0, interventions=(made,))
                for one, made in zip(part, interventions, strict=True)
            ]
        return cells


@dataclass(frozen=True, slots=True)
class RunningSweep:
    """A sweep whose cells are being stepped."""

    planned: SweepPlan
    sweep: Sweep
    cells: Sequence[Cell]
    baseline: StepRecord
    source: StepRecord | None

    def counts(self) -> AsyncGenerator[int, None]:
        """Step the cells; tells how many are done. To be closed where it is left early."""
        return self.sweep.run(self.cells)

    @property
    def usage(self) -> Mapping[str, int]:
        """What the cells cost."""
        return {"cells": len(self.cells), "steps": self.sweep.n_steps}

    def message(self, report: Report) -> Message:
        """The answer, once all cells are done. Any thread.

        In frames the baselines are tensors beside the grid's: `baseline/logits`, `source/logits`.
        """
        head = self._head(report)
        parts = self._parts()
        if report.form.is_raw:
            beside = {
                f"{part}/{name}": tensor
                for part, tensors in parts.items()
                for name, tensor in (tensors or {}).items()
            }
            return Message(head, self._grid() | beside)
        told = {part: _json(tensors, report) for part, tensors in parts.items()}
        return Message({**head, "points": _json(self._grid(), report), **told})

    def _head(self, report: Report) -> dict[str, Any]:
        axes = [{"name": axis.name, "values": axis.values} for axis in self.planned.grid.axes]
        return {
            "object": "sweep",
            "at": self.planned.sight.at,
            "axes": axes,
            "usage": self.usage,
            **report.aliases,
        }

    def _grid(self) -> dict[str, Tensor]:
        grid = self.planned.grid
        names = tuple(axis.name for axis in grid.axes)
        return {
            str(point): Tensor(array.reshape(*grid.shape, *array.shape[1:]), names + point.axes)
            for point, array in self.sweep.arrays.items()
        }

    def _parts(self) -> dict[str, dict[str, Tensor] | None]:
        return {
            "baseline": _tensors(self.baseline.points),
            "source": None if self.source is None else _tensors(self.source.points),
        }


def _tensors(arrays: Mapping[Point, Array]) -> dict[str, Tensor]:
    return {str(point): Tensor(array, point.axes) for point, array in arrays.items()}


def _json(tensors: Mapping[str, Tensor] | None, report: Report) -> dict[str, Any] | None:
    if tensors is None:
        return None
    return {name: tensor_json(*tensor, report.encoding) for name, tensor in tensors.items()}

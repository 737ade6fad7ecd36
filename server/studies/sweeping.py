"""One sweep on its way. The event loop.

Whatever can be refused is refused before a stream's first byte:

    SweepPlan ── begin: values and baselines ── RunningSweep ── counts ── message
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import EngineError
from engine.events import StepRecord
from engine.studies.guard import Guard
from engine.studies.rows import Array
from engine.studies.sweep import Cell, Readout, Sweep
from model.points import Point
from server.errors import blaming
from server.host import Service
from server.inputs import Report
from server.interventions.plan import Computed, Planned
from server.interventions.values import Found, resolve_held
from server.studies.template import FIELD, Grid, in_template
from server.wire import Message, Tensor
from sessions.errors import SessionError
from sessions.session import Session

_SLICE = 256
"""Cells whose values are fetched at once."""


def guarded(service: Service, session: Session, length: int) -> Guard:
    """A session that must keep its first `length` steps."""
    return Guard(session, length, lambda: service.engine.view(session.id).session)


def source_of(service: Service, plan: Sequence[Planned], at: int) -> Guard | None:
    """The session that values come from, if they come from one: there is one template.

    Raises:
        Blamed: there is no such session.
    """
    read = [one.source for one in plan if isinstance(one.source, Computed)]
    if not read:
        return None
    with blaming(FIELD, SessionError):
        session = service.engine.view(read[0].session_id).session
    return guarded(service, session, 1 + max(at, *(value.position for value in read)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What `readout` has of a session for each cell of `grid`; `plan` has their interventions."""

    readout: Readout
    grid: Grid
    plan: Sequence[Planned]
    source: Guard | None
    follows_source: bool  # `at` means the last position, of the source too

    async def begin(self, service: Service) -> "RunningSweep":
        """Fetch what the cells are edited with and compared to.

        Raises:
            Blamed: a value is not there.
            EngineError, SessionError: refused or failed.
        """
        baseline = await self.readout.record(service.engine)
        cells = await self._cells(service)
        source = await self._source(service)
        sweep = Sweep(service.engine, self.readout, baseline, n_cells=len(cells))
        return RunningSweep(self, sweep, cells, baseline, source)

    async def _source(self, service: Service) -> StepRecord | None:
        """What the source has where the session is looked at; None where it is shorter."""
        if self.source is None:
            return None
        last = self.source.session.past_length - 1
        at = last if self.follows_source else self.readout.at
        if not 0 <= at <= last:
            return None
        with blaming(FIELD, EngineError):
            return await replace(self.readout, guard=self.source, at=at).record(service.engine)

    def _check_source(self) -> None:
        """See that values which are fetched now are of the same history as those before."""
        if self.source is not None:
            with blaming(FIELD, EngineError):
                self.source.check()

    async def _cells(self, service: Service) -> list[Cell]:
        cells: list[Cell] = []
        found: Found = {}
        for at in range(0, len(self.plan), _SLICE):
            part = self.plan[at : at + _SLICE]
            self._check_source()
            with in_template():
                interventions = await resolve_held(service, part, found)
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
        """The answer, once all cells are done. Any thread."""
        beside = {
            "baseline": _tensors(self.baseline.points),
            "source": None if self.source is None else _tensors(self.source.points),
        }
        return Message(self._head(report), self._grid(), beside)

    def _head(self, report: Report) -> dict[str, Any]:
        axes = [{"name": axis.name, "values": axis.values} for axis in self.planned.grid.axes]
        return {
            "object": "sweep",
            "at": self.planned.readout.at,
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


def _tensors(arrays: Mapping[Point, Array]) -> dict[str, Tensor]:
    return {str(point): Tensor(array, point.axes) for point, array in arrays.items()}

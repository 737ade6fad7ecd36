"""One edit in many places: a grid of branches that nobody keeps. The event loop.

Each cell steps only what follows its edit, beside the others in the shared batch; a cell that edits
after the position that is looked at is what the session has there anyway.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.commands import Capture, Probe, Read
from engine.events import StepRecord
from engine.studies.flow import Probing, in_order
from engine.studies.guard import Guard
from engine.studies.reach import up_to
from engine.studies.rows import Array
from model.points import Point
from sessions.edits import Intervention
from sessions.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One place of a grid. `start` is the first position that is edited."""

    start: int
    interventions: tuple[Intervention, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """What is looked at: points of one position of a session that must stay as it is."""

    guard: Guard
    points: tuple[Point, ...]
    at: int

    @property
    def session(self) -> Session:
        """As it was when the study began."""
        return self.guard.session

    @property
    def capture(self) -> Capture:
        """As the engine takes it."""
        return Capture(points=self.points, positions=frozenset([self.at]))

    async def record(self, engine: Probing) -> StepRecord:
        """What the session itself has there.

        Raises:
            EngineError, SessionError: refused or failed, or the session has changed.
        """
        owner, session_id = self.session.owner, self.session.id
        self.guard.check()
        command = Read(session_id=session_id, owner=owner, capture=self.capture)
        async with engine.read(command) as reply:
            return (await reply.result()).records[0]


class Sweep:
    """A grid of `n_cells`, whose baseline is what `readout` has without any edit.

    `arrays` are [n_cells, ...]; a cell's part is there once it was counted. `n_steps` is what they
    cost.
    """

    def __init__(
        self,
        engine: Probing,
        readout: Readout,
        baseline: StepRecord,
        *,
        n_cells: int,
    ) -> None:
        self.n_steps = 0
        self.arrays: dict[Point, Array] = {
            point: np.empty((n_cells, *row.shape), np.float32)
            for point, row in baseline.points.items()
        }
        self._engine = engine
        self._readout = readout
        self._baseline = baseline

    async def run(self, cells: Iterable[Cell]) -> AsyncGenerator[int, None]:
        """Fill in `cells`; tells how many are done. To be closed where it is left early.

        Raises:
            EngineError, SessionError: a cell was refused or failed, or the session has changed.
        """
        attempts = (partial(self._step, cell) for cell in cells)
        async with aclosing(in_order(attempts, self._engine.turns)) as records:
            n_done = 0
            async for record in records:
                for point, array in self.arrays.items():
                    array[n_done] = record.points[point]
                n_done += 1
                yield n_done

    async def _step(self, cell: Cell) -> StepRecord:
        self._readout.guard.check()
        if cell.start > self._readout.at:
            return self._baseline
        async with self._engine.probe(self._probe(cell)) as reply:
            done = await reply.result()
        self.n_steps += done.usage.steps
        return done.records[0]

    def _probe(self, cell: Cell) -> Probe:
        readout, stop = self._readout, self._readout.at + 1
        return Probe(
            session_id=readout.session.id,
            owner=readout.session.owner,
            at=cell.start,
            stop=stop,
            interventions=up_to(cell.interventions, stop),
            capture=readout.capture,
            of_study=True,
        )

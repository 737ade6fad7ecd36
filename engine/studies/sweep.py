"""One edit in many places: a grid of branches that nobody keeps. The event loop.

Each cell steps only what follows its edit, beside the others in the shared batch; a cell that edits
after the position that is looked at is what the session has there anyway.
"""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.commands import Capture, Probe, Read
from engine.errors import SessionChanged
from engine.events import StepRecord
from engine.studies.flow import Probing, in_order
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
class Sight:
    """What is looked at: points of one position of a session, as it was when the study began."""

    session: Session
    points: tuple[Point, ...]
    at: int

    @property
    def capture(self) -> Capture:
        """As the engine takes it."""
        return Capture(points=self.points, positions=frozenset([self.at]))

    async def record(self, engine: Probing) -> StepRecord:
        """What the session itself has there.

        Raises:
            EngineError, SessionError: refused or failed.
        """
        owner, session_id = self.session.owner, self.session.id
        command = Read(session_id=session_id, owner=owner, capture=self.capture)
        async with engine.read(command) as reply:
            return (await reply.result()).records[0]


class Sweep:
    """A grid of `n_cells`. `current` tells what the session is by now.

    `arrays` are [n_cells, ...]; a cell's part is there once it was counted. `n_steps` is what they
    cost.
    """

    def __init__(
        self,
        engine: Probing,
        sight: Sight,
        baseline: StepRecord,
        *,
        n_cells: int,
        current: Callable[[], Session],
    ) -> None:
        self.n_steps = 0
        self.arrays: dict[Point, Array] = {
            point: np.empty((n_cells, *row.shape), np.float32)
            for point, row in baseline.points.items()
        }
        self._engine = engine
        self._sight = sight
        self._baseline = baseline
        self._current = current

    async def run(self, cells: Iterable[Cell]) -> AsyncGenerator[int, None]:
        """Fill in `cells`; tells how many are done. To be closed where it is left early.

        Raises:
            EngineError, SessionError: a cell was refused or failed.
        """
        attempts = (partial(self._step, cell) for cell in cells)
        async with aclosing(in_order(attempts)) as records:
            n_done = 0
            async for record in records:
                for point, array in self.arrays.items():
                    array[n_done] = record.points[point]
                n_done += 1
                yield n_done

    async def _step(self, cell: Cell) -> StepRecord:
        if cell.start > self._sight.at:
            return self._baseline
        async with self._engine.probe(self._probe(cell)) as reply:
            self._check_unchanged()
            done = await reply.result()
        self.n_steps += done.usage.steps
        return done.records[0]

    def _probe(self, cell: Cell) -> Probe:
        sight = self._sight
        return Probe(
            session_id=sight.session.id,
            owner=sight.session.owner,
            at=cell.start,
            stop=sight.at + 1,
            interventions=up_to(cell.interventions, sight.at + 1),
            capture=sight.capture,
        )

    def _check_unchanged(self) -> None:
        """What was begun just now saw the session as it is now.

        Raises:
            SessionChanged: it is not what the grid began with.
        """
        length = self._sight.at + 1
        before, now = self._sight.session.step_keys, self._current().step_keys
        if before[:length] != now[:length]:
            raise SessionChanged(self._sight.session.id)

"""One iteration: choose ids, step a batch, read logits, make records. The model thread.

A fault fails its own rows. A batch that fails is stepped again row by row, which is harmless (rows
are written at the same positions with the same values), and only those that fail alone are lost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog

from engine.errors import EditNotFinite, StepFailed
from engine.events import StepRecord
from engine.job import Job
from engine.limits import LOGITS_ROWS
from engine.protocol import Model
from engine.sight import LogitsRow
from model.batch import Captured, Floats
from model.errors import NonFiniteHidden
from model.points import Point

logger = structlog.get_logger()

Grants = Sequence[tuple[Job, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one iteration did for one job: records to commit, or the end of it."""

    job: Job
    records: Sequence[StepRecord] = ()
    error: StepFailed | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    """A row of the head's product that a job waits for: of `ln_f` in the cache, or `hidden`."""

    job: Job
    position: int
    lens: Point | None = None
    hidden: Floats | None = None  # [C]

    def take(self, row: LogitsRow) -> None:
        """Give the job its row [V]."""
        if self.lens is None:
            self.job.score(self.position, row)
        else:
            self.job.sight.take_lens(self.position, self.lens, row)


_Stepped = tuple[Job, range, Captured]


class Stepper:
    """Runs iterations on a model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def run(self, grants: Grants) -> list[Outcome]:
        """Step each job by the tokens it was granted; one outcome per job, never an exception."""
        failed: dict[Job, StepFailed] = {}
        self._choose([job for job, _ in grants if job.wants_id], failed)
        stepped = self._step([(job, n) for job, n in grants if job not in failed], failed)
        self._score(_readings(stepped), failed)
        records = self._records(stepped, failed)
        return [
            Outcome(job, error=failed[job]) if job in failed else Outcome(job, records[job])
            for job, _ in grants
        ]

    def _choose(self, jobs: Sequence[Job], failed: dict[Job, StepFailed]) -> None:
        first = [job for job in jobs if job.wants_first_row()]
        self._score([_Reading(job, job.kv.length - 1) for job in first], failed)
        for job in jobs:
            if job not in failed:
                _guarded(job, failed, job.choose)

    def _step(
        self, grants: Grants, failed: dict[Job, StepFailed]
    ) -> dict[Job, tuple[range, Captured]]:
        found = [grant for grant in grants if grant[0].finds]
        missing = [grant for grant in grants if not grant[0].finds]
        stepped = {}
        for job, positions, captured in [
            *self._look_up(found, failed),
            *self._forward(missing, failed),
        ]:
            job.advance(positions)
            stepped[job] = positions, captured
        return stepped

    def _look_up(self, grants: Grants, failed: dict[Job, StepFailed]) -> list[_Stepped]:
        """Tokens whose rows are in the cache already: nothing is computed."""
        looked_up = []
        for job, n in grants:
            try:
                row = job.row(n)
                looked_up.append((job, row.positions, self._model.look_up(row)))
            except Exception as error:
                failed[job] = _step_failed(error)
        return looked_up

    def _forward(self, grants: Grants, failed: dict[Job, StepFailed]) -> list[_Stepped]:
        if not grants:
            return []
        rows = [job.row(n) for job, n in grants]
        for row in rows:
            if not row.reads_again:
                row.kv.stage(len(row.token_ids))
        try:
            captured = self._model.forward(rows)
        except Exception as error:
            if len(grants) == 1:
                failed[grants[0][0]] = _step_failed(error, edited=bool(grants[0][0].edits))
                return []
            return [one for grant in grants for one in self._forward([grant], failed)]
        return [
            (job, row.positions, own)
            for (job, _), row, own in zip(grants, rows, captured, strict=True)
        ]

    def _score(self, readings: Sequence[_Reading], failed: dict[Job, StepFailed]) -> None:
        """Multiply rows by the head: those in the cache first, as the model answers them."""
        ordered = sorted(readings, key=lambda reading: reading.hidden is not None)
        for i in range(0, len(ordered), LOGITS_ROWS):
            self._score_slice(ordered[i : i + LOGITS_ROWS], failed)

    def _score_slice(self, readings: Sequence[_Reading], failed: dict[Job, StepFailed]) -> None:
        wanted = [(one.job.kv, one.position) for one in readings if one.hidden is None]
        hidden = [one.hidden for one in readings if one.hidden is not None]
        try:
            rows = self._model.logits(wanted, np.stack(hidden) if hidden else None)
        except Exception as error:
            if len(readings) == 1:
                failed[readings[0].job] = _step_failed(error)
                return
            for one in readings:
                self._score_slice([one], failed)
            return
        for one, row in zip(readings, rows, strict=True):
            if one.job not in failed:
                _guarded(one.job, failed, partial(one.take, row))

    def _records(
        self,
        stepped: Mapping[Job, tuple[range, Captured]],
        failed: dict[Job, StepFailed],
    ) -> dict[Job, list[StepRecord]]:
        records: dict[Job, list[StepRecord]] = {}
        for job, (span, captured) in stepped.items():
            if job in failed:
                continue
            try:
                records[job] = job.stepped(span, captured)
            except Exception as error:
                failed[job] = _step_failed(error)
        return records


def _readings(stepped: Mapping[Job, tuple[range, Captured]]) -> list[_Reading]:
    """What the jobs need of the head, now that their steps are computed."""
    readings = []
    for job, (positions, captured) in stepped.items():
        readings += [_Reading(job, position) for position in job.unscored(positions)]
        for place, position in enumerate(job.seen(positions)):
            lenses = job.sight.lenses(captured, place)
            readings += [_Reading(job, position, point, row) for point, row in lenses]
    return readings


def _guarded(job: Job, failed: dict[Job, StepFailed], act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        failed[job] = _step_failed(error)


def _step_failed(error: Exception, *, edited: bool = False) -> StepFailed:
    """The client is told which kind of fault it was; the log gets the whole of it."""
    if edited and isinstance(error, NonFiniteHidden):
        return EditNotFinite()
    logger.error("step failed", exc_info=error)
    return StepFailed(f"a step failed with {type(error).__name__}")

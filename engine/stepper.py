"""One iteration: choose ids, step a batch, read logits, make records. The model thread.

A fault fails its own rows. A batch that fails is stepped again row by row, which is harmless (rows
are written at the same positions with the same values), and only those that fail alone are lost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from engine.errors import StepFailed
from engine.events import StepRecord
from engine.job import Job
from engine.limits import LOGITS_ROWS
from engine.protocol import Model
from model.batch import Captured

logger = structlog.get_logger()

Grants = Sequence[tuple[Job, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one iteration did for one job: records to commit, or the end of it."""

    job: Job
    records: Sequence[StepRecord] = ()
    error: StepFailed | None = None


class Stepper:
    """Runs iterations on a model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def run(self, grants: Grants) -> list[Outcome]:
        """Step each job by the tokens it was granted; one outcome per job, never an exception."""
        failed: dict[Job, StepFailed] = {}
        self._choose([job for job, _ in grants if job.wants_id], failed)
        stepped = self._step([(job, n) for job, n in grants if job not in failed], failed)
        self._score({job: job.unscored(span) for job, (span, _) in stepped.items()}, failed)
        records = self._records(stepped, failed)
        return [
            Outcome(job, error=failed[job]) if job in failed else Outcome(job, records[job])
            for job, _ in grants
        ]

    def _choose(self, jobs: Sequence[Job], failed: dict[Job, StepFailed]) -> None:
        first = [job for job in jobs if job.wants_first_row()]
        self._score({job: [job.kv.length - 1] for job in first}, failed)
        for job in jobs:
            if job not in failed:
                _guarded(job, failed, job.choose)

    def _step(
        self, grants: Grants, failed: dict[Job, StepFailed]
    ) -> dict[Job, tuple[range, Captured]]:
        found = [grant for grant in grants if grant[0].finds]
        missing = [grant for grant in grants if not grant[0].finds]
        stepped = {}
        for job, n, captured in [*self._look_up(found, failed), *self._forward(missing, failed)]:
            positions = range(job.kv.length, job.kv.length + n)
            job.advance(n)
            stepped[job] = positions, captured
        return stepped

    def _look_up(
        self, grants: Grants, failed: dict[Job, StepFailed]
    ) -> list[tuple[Job, int, Captured]]:
        """Tokens whose rows are in the cache already: nothing is computed."""
        looked_up = []
        for job, n in grants:
            try:
                looked_up.append((job, n, self._model.look_up(job.row(n))))
            except Exception as error:
                failed[job] = _step_failed(error)
        return looked_up

    def _forward(
        self, grants: Grants, failed: dict[Job, StepFailed]
    ) -> list[tuple[Job, int, Captured]]:
        if not grants:
            return []
        for job, n in grants:
            job.kv.stage(n)
        try:
            captured = self._model.forward([job.row(n) for job, n in grants])
        except Exception as error:
            if len(grants) == 1:
                failed[grants[0][0]] = _step_failed(error)
                return []
            return [one for grant in grants for one in self._forward([grant], failed)]
        return [(job, n, own) for (job, n), own in zip(grants, captured, strict=True)]

    def _score(self, wanted: Mapping[Job, Sequence[int]], failed: dict[Job, StepFailed]) -> None:
        flat = [(job, position) for job, positions in wanted.items() for position in positions]
        for i in range(0, len(flat), LOGITS_ROWS):
            self._score_slice(flat[i : i + LOGITS_ROWS], failed)

    def _score_slice(
        self, wanted: Sequence[tuple[Job, int]], failed: dict[Job, StepFailed]
    ) -> None:
        try:
            rows = self._model.logits([(job.kv, position) for job, position in wanted])
        except Exception as error:
            if len(wanted) == 1:
                failed[wanted[0][0]] = _step_failed(error)
                return
            for one in wanted:
                self._score_slice([one], failed)
            return
        for (job, position), row in zip(wanted, rows, strict=True):
            if job not in failed:
                _guarded(job, failed, partial(job.score, position, row))

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


def _guarded(job: Job, failed: dict[Job, StepFailed], act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        failed[job] = _step_failed(error)


def _step_failed(error: Exception) -> StepFailed:
    """The client is told which kind of fault it was; the log gets the whole of it."""
    logger.error("step failed", exc_info=error)
    return StepFailed(f"a step failed with {type(error).__name__}")

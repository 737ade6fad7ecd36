"""The method: engines take turns, and only what one round says about two of them is compared.

1. One process per engine (`bench.worker`), all of a case's loaded before its first measurement.
2. A round calls every engine once on one case; the next round goes in reversed order. A pause
   before each call lets the last engine's threads go to sleep. Where an engine does a case in
   several ways ("sides", such as with internals and without), they take turns inside of its call.
3. Steps during which the machine ran something else are dropped (`bench.samples`). An engine that
   keeps too few has more turns at the end of its round; what is still too few is left out, never
   used raw.
4. A ratio is made of two medians of one round; what is reported is the median ratio over rounds,
   with the smallest and the largest (`bench.report`).

An engine builds a case's state before the timed steps and frees it after them, so that the largest
caches are never in memory at the same time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.cases import Case, engine_of
from bench.samples import Sample, clean_median
from bench.worker import Worker

PAUSE_SECONDS = 0.25
ATTEMPTS = 3  # turns in one round, at most

Round = Mapping[str, Sequence[Sample]]  # by engine, or side of it


@dataclass(slots=True)
class CaseResult:
    """All rounds of one case."""

    case: Case
    rounds: list[Round] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Who took part."""
        return list(dict.fromkeys(name for one in self.rounds for name in one))

    def medians(self) -> list[dict[str, float]]:
        """Per round, the clean median seconds of each engine that has one."""
        return [_medians(one) for one in self.rounds]

    def counts(self, engine: str) -> tuple[int, int]:
        """Clean and total samples of an engine."""
        samples = [sample for one in self.rounds for sample in one.get(engine, ())]
        return sum(sample.is_clean for sample in samples), len(samples)


def measure(
    case: Case, workers: Sequence[Worker], *, n_rounds: int, say: Callable[[str], None]
) -> CaseResult:
    """`n_rounds` rounds of one case."""
    result = CaseResult(case)
    for i in range(n_rounds):
        order = workers if i % 2 == 0 else workers[::-1]
        result.rounds.append(_whole_round(case, order, say))
        medians = result.medians()[-1]
        times = (f"{name} {seconds * 1000:.1f}" for name, seconds in medians.items())
        say(f"{case.name} round {i + 1}/{n_rounds}, ms: {', '.join(times)}")
    return result


def _whole_round(case: Case, workers: Sequence[Worker], say: Callable[[str], None]) -> Round:
    one: dict[str, list[Sample]] = {}
    lacking = list(workers)
    for _ in range(ATTEMPTS):
        for worker in lacking:
            for name, samples in _turn(worker, case).items():
                one.setdefault(name, []).extend(samples)
        unclear = {engine_of(name) for name in one.keys() - _medians(one).keys()}
        lacking = [worker for worker in workers if worker.spec.name in unclear]
        if not lacking:
            break
        say(f"{case.name}: too few clean steps of {', '.join(w.spec.name for w in lacking)}")
    return one


def _turn(worker: Worker, case: Case) -> Round:
    time.sleep(PAUSE_SECONDS)
    return worker.measure(case)


def _medians(one: Round) -> dict[str, float]:
    medians = {name: clean_median(samples) for name, samples in one.items()}
    return {name: seconds for name, seconds in medians.items() if seconds is not None}

"""One timed step, and whether the machine let it run.

Where neighbours take a core, one OpenMP thread waits at a barrier for the other and the wall time
says nothing about the code. Linux counts how long a thread was runnable and not run (`schedstat`);
a step that lost more than 3 % of its time that way is dropped.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_DELAY = 0.03
MIN_CLEAN = 5  # fewer clean steps than this say nothing
WARM_UP = 2

_TASKS = Path("/proc/self/task")


class Sample(NamedTuple):
    """Seconds of one step, and seconds that this process's threads waited for a core in it."""

    seconds: float
    delay: float

    @property
    def is_clean(self) -> bool:
        return self.delay <= MAX_DELAY * self.seconds

    def per(self, n: int) -> "Sample":
        """Of one of the `n` equal parts that the step had."""
        return Sample(self.seconds / n, self.delay / n)


Sides = Mapping[str, list[Sample]]
"""The samples of each way in which an engine does a case; most have one, named ""."""


def run_delay() -> float:
    """Seconds that this process's threads have been runnable and not run. 0 where unknown."""
    total = 0
    for path in _TASKS.glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except OSError:  # the thread has ended
            continue
    return total / 1e9


def timed(step: Callable[[], object]) -> Sample:
    """One call of `step`."""
    delay = run_delay()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return Sample(seconds, run_delay() - delay)


def repeat(
    step: Callable[[], object], times: int, *, between: Callable[[], object] = lambda: None
) -> list[Sample]:
    """`times` samples of `step` after a warm-up; `between` runs untimed before each."""
    samples = []
    for _ in range(WARM_UP + times):
        between()
        samples.append(timed(step))
    return samples[WARM_UP:]


def in_turns(
    sides: Mapping[str, Callable[[], Sample]], times: int, *, warm_up: int = WARM_UP
) -> Sides:
    """`times` samples of each side after a warm-up: one of each, then backwards, and so on."""
    names = list(sides)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for i in range(warm_up + times):
        for name in names if i % 2 == 0 else names[::-1]:
            samples[name].append(sides[name]())
    return {name: own[warm_up:] for name, own in samples.items()}


def clean_median(samples: Sequence[Sample]) -> float | None:
    """Median seconds of the clean samples; None if there are too few."""
    clean = [sample.seconds for sample in samples if sample.is_clean]
    if len(clean) < min(MIN_CLEAN, len(samples)) or not clean:
        return None
    return statistics.median(clean)

from collections.abc import Sequence
from typing import cast

import pytest

from bench import driver
from bench.cases import Case, Decode, EngineSpec, side_of
from bench.samples import Sample
from bench.worker import Worker

CASE = Decode(1, 128, 5)


class FakeWorker:
    """Answers from a list, the same for each of its sides; the last answer repeats."""

    def __init__(
        self, name: str, log: list[str], *answers: list[Sample], sides: Sequence[str] = ("",)
    ) -> None:
        self.spec = EngineSpec("fake", name)
        self._log = log
        self._answers = list(answers)
        self._sides = sides

    def measure(self, case: Case) -> dict[str, list[Sample]]:
        self._log.append(self.spec.dtype)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return {side_of(self.spec.name, side): answer for side in self._sides}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PAUSE_SECONDS", 0)


def measured(workers: list[FakeWorker], n_rounds: int) -> driver.CaseResult:
    return driver.measure(
        CASE, cast(list[Worker], workers), n_rounds=n_rounds, say=lambda line: None
    )


def clean(seconds: float) -> list[Sample]:
    return [Sample(seconds, 0.0)] * 5


DIRTY = [Sample(1.0, 1.0)] * 5


def test_order_is_reversed_every_round() -> None:
    log: list[str] = []
    measured([FakeWorker(name, log, clean(1)) for name in "abc"], n_rounds=3)
    assert "".join(log) == "abccbaabc"


def test_who_was_disturbed_has_another_turn_at_the_end_of_the_round() -> None:
    log: list[str] = []
    workers = [FakeWorker("a", log, DIRTY, clean(1)), FakeWorker("b", log, clean(3))]
    result = measured(workers, n_rounds=1)
    assert result.medians() == [{"fake-a": 1.0, "fake-b": 3.0}]
    assert result.counts("fake-a") == (5, 10)
    assert "".join(log) == "aba"


def test_few_clean_steps_of_two_turns_are_enough_together() -> None:
    log: list[str] = []
    some = [*clean(2)[:3], *DIRTY[:3]]
    assert measured([FakeWorker("a", log, some)], n_rounds=1).medians() == [{"fake-a": 2.0}]
    assert "".join(log) == "aa"


def test_what_stays_disturbed_is_left_out_in_the_end() -> None:
    log: list[str] = []
    workers = [FakeWorker("a", log, clean(1)), FakeWorker("b", log, DIRTY)]
    result = measured(workers, n_rounds=1)
    assert result.medians() == [{"fake-a": 1.0}]
    assert result.counts("fake-b") == (0, 5 * driver.ATTEMPTS)
    assert "".join(log) == "a" + "b" * driver.ATTEMPTS


def test_the_sides_of_an_engine_are_told_apart_and_have_their_turns_together() -> None:
    log: list[str] = []
    sided = FakeWorker("a", log, DIRTY, clean(1), sides=["", "one"])
    result = measured([sided, FakeWorker("b", log, clean(3))], n_rounds=1)
    assert result.medians() == [{"fake-a": 1.0, "fake-a+one": 1.0, "fake-b": 3.0}]
    assert result.names == ["fake-a", "fake-a+one", "fake-b"]
    assert "".join(log) == "aba"

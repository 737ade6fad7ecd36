from functools import partial

import pytest

from bench.samples import WARM_UP, Sample, clean_median, in_turns, repeat, timed

CLEAN, DIRTY = Sample(1.0, 0.03), Sample(9.0, 0.28)


def test_a_step_that_waited_for_a_core_is_not_clean() -> None:
    assert CLEAN.is_clean
    assert not DIRTY.is_clean


def test_median_is_of_clean_steps_only() -> None:
    assert clean_median([CLEAN] * 5 + [DIRTY] * 20) == 1.0


@pytest.mark.parametrize("samples", [[], [CLEAN] * 4 + [DIRTY], [DIRTY] * 3])
def test_too_few_clean_steps_say_nothing(samples: list[Sample]) -> None:
    assert clean_median(samples) is None


def test_a_short_run_needs_all_its_steps_clean() -> None:
    assert clean_median([CLEAN, CLEAN]) == 1.0
    assert clean_median([CLEAN, DIRTY]) is None


def test_repeat_warms_up_and_runs_between() -> None:
    calls: list[str] = []
    samples = repeat(lambda: calls.append("step"), 3, between=lambda: calls.append("between"))
    assert len(samples) == 3
    assert calls == ["between", "step"] * (3 + WARM_UP)


def test_a_sample_measures_its_step() -> None:
    sample = timed(lambda: sum(range(1000)))
    assert sample.seconds > 0
    assert sample.delay >= 0


def test_sides_take_turns_and_every_other_turn_is_backwards() -> None:
    called: list[str] = []

    def side(name: str) -> Sample:
        called.append(name)
        return Sample(len(called), 0.0)

    samples = in_turns({name: partial(side, name) for name in "ab"}, 2, warm_up=1)
    assert "".join(called) == "abbaab"
    seconds = {name: [sample.seconds for sample in own] for name, own in samples.items()}
    assert seconds == {"a": [4, 5], "b": [3, 6]}


def test_a_part_of_a_step_is_as_clean_as_the_step() -> None:
    assert Sample(6.0, 0.3).per(3) == pytest.approx((2.0, 0.1))
    assert not Sample(6.0, 0.3).per(3).is_clean

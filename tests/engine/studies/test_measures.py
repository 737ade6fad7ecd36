"""Differences against the same thing written by hand in plain Python, and against scipy's maths."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.studies.measures import NO_GAP, distance, gap, kl_divergence
from tests.engine.studies.scripted import some_numbers

FLOATS = st.floats(-1e6, 1e6, width=32)
PAIRS = st.integers(1, 6).flatmap(
    lambda n: st.tuples(arrays(np.float32, (2, n), elements=FLOATS), arrays(np.float32, (2, n)))
)


@given(PAIRS)
@settings(deadline=None, max_examples=60)
def test_a_gap_is_the_largest_difference_whatever_the_numbers(
    pair: tuple[np.ndarray, np.ndarray],
) -> None:
    a, b = pair
    found = gap(a, b)
    differences = {
        (i, j): abs(float(a[i, j]) - float(b[i, j])) for i in range(2) for j in range(a.shape[1])
    }
    if any(map(math.isnan, differences.values())):
        assert found.absolute == math.inf
    else:
        assert found.absolute == max(differences.values())
    if found.index is not None and math.isfinite(found.absolute):
        assert differences[found.index] == found.absolute  # type: ignore[index]  # two axes
    assert found.relative >= 0


def test_a_gap_says_where_and_how_much_of_the_larger_number() -> None:
    a = np.array([[1.0, 2.0], [3.0, 0.0]], dtype=np.float32)
    b = np.array([[1.0, 4.0], [3.0, -0.5]], dtype=np.float32)
    found = gap(a, b)
    assert (found.absolute, found.relative, found.index) == (2.0, 1.0, (0, 1))


def test_equal_tensors_have_no_gap_and_equal_infinities_are_equal() -> None:
    a = np.array([1.0, -np.inf, 2.0], dtype=np.float32)
    assert gap(a, a.copy()) is NO_GAP
    assert gap(a, np.array([1.0, -np.inf, 3.0], dtype=np.float32)).absolute == 1.0


@pytest.mark.parametrize("other", [np.nan, np.inf])
def test_what_is_not_finite_is_infinitely_far(other: float) -> None:
    a, b = np.zeros(3, np.float32), np.zeros(3, np.float32)
    b[1] = other
    for found in (gap(a, b), gap(b, a)):
        assert (found.absolute, found.relative, found.index) == (math.inf, math.inf, (1,))


def test_distances_are_those_written_by_hand() -> None:
    a, b = some_numbers(3, 4, seed=1), some_numbers(3, 4, seed=2)
    x, y = [float(v) for v in a.ravel()], [float(v) for v in b.ravel()]
    norm_a, norm_b = math.hypot(*x), math.hypot(*y)
    found = distance(a, b)
    assert found.l2 == pytest.approx(math.dist(x, y), rel=1e-12)
    assert (found.norm_a, found.norm_b) == pytest.approx((norm_a, norm_b), rel=1e-12)
    cosine = math.fsum(i * j for i, j in zip(x, y, strict=True)) / (norm_a * norm_b)
    assert found.cosine == pytest.approx(cosine, rel=1e-12)


def test_a_zero_vector_has_no_direction() -> None:
    zero, one = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert distance(zero, one).cosine is None
    assert distance(one, zero).cosine is None
    assert distance(zero, one).l2 == 2.0


def test_what_is_infinite_is_told_and_not_warned_about() -> None:
    masked = np.array([-np.inf, 1.0], dtype=np.float32)
    assert math.isnan(distance(masked, masked).l2)
    assert math.isnan(kl_divergence(masked, masked))


def test_kl_is_in_nats_and_against_the_definition() -> None:
    a, b = 5 * some_numbers(50257, seed=1), 5 * some_numbers(50257, seed=2)

    def log_p(logits: np.ndarray) -> list[float]:
        top = max(map(float, logits))
        total = math.fsum(math.exp(float(v) - top) for v in logits)
        return [float(v) - top - math.log(total) for v in logits]

    p, q = log_p(a), log_p(b)
    expected = math.fsum(math.exp(i) * (i - j) for i, j in zip(p, q, strict=True))
    assert kl_divergence(a, b) == pytest.approx(expected, rel=1e-9)
    assert kl_divergence(a, b) != pytest.approx(kl_divergence(b, a), rel=1e-3)
    assert kl_divergence(a, a) == 0


def test_kl_of_a_coin_is_known() -> None:
    fair, biased = np.zeros(2, np.float32), np.log(np.array([0.75, 0.25])).astype(np.float32)
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl_divergence(fair, biased) == pytest.approx(expected, rel=1e-6)


def test_kl_stands_shifts_and_large_logits() -> None:
    a = 300 * some_numbers(100, seed=3)
    assert kl_divergence(a, a + np.float32(1000)) == pytest.approx(0, abs=1e-3)
    assert kl_divergence(a, -a) > 100

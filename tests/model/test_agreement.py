"""tests.agreement itself: what passes as equal, and what must not."""

import numpy as np
import pytest

from tests.agreement import assert_agrees, assert_same_greedy


@pytest.mark.parametrize(
    ("reference", "difference", "agrees"),
    [
        (0.0, 0.99e-4, True),
        (0.0, 1.01e-4, False),
        (50.0, 5.9e-4, True),  # 1e-4 + 1e-5 x 50
        (-50.0, -5.9e-4, True),
        (50.0, 6.1e-4, False),
    ],
)
def test_an_element_may_differ_by_its_own_size(
    reference: float, difference: float, agrees: bool
) -> None:
    _check([reference + difference], [reference], agrees)


@pytest.mark.parametrize(("difference", "agrees"), [(3.0e-3, True), (3.2e-3, False)])
def test_a_giant_in_the_row_widens_its_tolerance(difference: float, agrees: bool) -> None:
    _check([[3000.0, difference]], [[3000.0, 0.0]], agrees)


def test_a_giant_in_another_row_does_not() -> None:
    _check([[3000.0, 0.0], [0.0, 3e-3]], [[3000.0, 0.0], [0.0, 0.0]], agrees=False)


@pytest.mark.parametrize(("difference", "agrees"), [(1.9e-5, True), (2.1e-5, False)])
def test_fresh_weights_leave_less(difference: float, agrees: bool) -> None:
    _check([difference], [0.0], agrees, fresh=True)


def test_nan_and_other_shapes_disagree() -> None:
    _check([float("nan")], [0.0], agrees=False)
    _check([0.0, 0.0], [0.0], agrees=False)


def test_greedy_must_be_the_same_where_the_choice_is_clear() -> None:
    clear, close = [0.0, 1.0, 0.5], [0.0, 1.0, 0.9999]

    assert_same_greedy([[0.0, 0.9999, 1.0]], [close])
    with pytest.raises(AssertionError, match="another greedy id"):
        assert_same_greedy([[0.0, 0.9999, 1.0], [0.0, 0.5, 1.0]], [close, clear])


def _check(actual: object, reference: object, agrees: bool, *, fresh: bool = False) -> None:
    ours, theirs = np.array(actual), np.array(reference)
    if agrees:
        assert_agrees(ours, theirs, fresh=fresh)
    else:
        with pytest.raises(AssertionError):
            assert_agrees(ours, theirs, fresh=fresh)

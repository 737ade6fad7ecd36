import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding.errors import PositionOverflow
from embedding.positions import check_positions, positions_for


def test_p03_the_offset_advances_once() -> None:
    assert positions_for(0, 6, 1024) == range(6)
    assert [positions_for(past, 1, 1024) for past in (6, 7, 8)] == [
        range(6, 7),
        range(7, 8),
        range(8, 9),
    ]


@given(st.integers(0, 1024), st.integers(0, 1024))
def test_positions_are_absolute_and_never_wrap(past_length: int, n_new: int) -> None:
    if past_length + n_new <= 1024:
        expected = [past_length + t for t in range(n_new)]
        assert list(positions_for(past_length, n_new, 1024)) == expected
    else:
        with pytest.raises(PositionOverflow):
            positions_for(past_length, n_new, 1024)


@pytest.mark.parametrize(
    ("past_length", "n_new"), [(0, 0), (0, 1), (0, 1023), (0, 1024), (1023, 1), (1024, 0)]
)
def test_c02_exactly_the_limit_fits(past_length: int, n_new: int) -> None:
    assert len(positions_for(past_length, n_new, 1024)) == n_new


@pytest.mark.parametrize(("past_length", "n_new"), [(0, 1025), (1023, 2), (1024, 1), (1000, 25)])
def test_c01_c12_one_more_is_refused_with_the_true_numbers(past_length: int, n_new: int) -> None:
    with pytest.raises(PositionOverflow, match="maximum context length is 1024 tokens") as refusal:
        positions_for(past_length, n_new, 1024)
    error = refusal.value
    assert (error.past_length, error.n_new, error.n_ctx) == (past_length, n_new, 1024)
    assert str(past_length + n_new) in str(error)


def test_a_negative_past_length_is_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        positions_for(-1, 1, 1024)


def test_given_positions_are_checked_at_both_ends() -> None:
    check_positions([], 1024)
    check_positions([1023, 0], 1024)
    with pytest.raises(PositionOverflow):
        check_positions([0, 1024, 3], 1024)
    with pytest.raises(AssertionError):
        check_positions([0, -1], 1024)

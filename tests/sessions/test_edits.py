from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessions.edits import (
    Edit,
    Intervention,
    Span,
    StepEdits,
    Value,
    edits_at,
    joined,
    step_keys,
    within,
)

SPAN = st.tuples(st.integers(0, 20), st.integers(1, 9) | st.none()).map(
    lambda span: (span[0], span[1] and span[0] + span[1])
)
ONE = Value((2,), b"\0\0\x80\x3f\0\0\0\0")
ADD = Edit(point="resid_post.1", op="add", value=ONE, scale=2.0)
ZERO = Edit(point="z.0[1]", op="scale", scale=0.0)


def test_equal_edits_are_one() -> None:
    again = Edit(point="resid_post.1", op="add", value=Value((2,), bytes(ONE.data)), scale=2)
    assert again == ADD
    assert hash(again) == hash(ADD)


@pytest.mark.parametrize(
    "other",
    [
        replace(ADD, point="resid_post.0"),
        replace(ADD, op="replace"),
        replace(ADD, scale=2.0000001),
        replace(ADD, value=None),
        replace(ADD, value=Value((1, 2), ONE.data)),
        replace(ADD, value=Value((2,), bytes(8))),
        replace(ADD, keys=((0, 1),)),
    ],
)
def test_edits_that_differ_anywhere_are_told_apart(other: Edit) -> None:
    assert other != ADD
    assert other.digest != ADD.digest
    assert step_keys([7], {0: (other,)}) != step_keys([7], {0: (ADD,)})


def test_the_order_of_edits_counts() -> None:
    assert step_keys([7], {0: (ADD, ZERO)}) != step_keys([7], {0: (ZERO, ADD)})


def test_a_value_is_named_by_its_bytes() -> None:
    assert ONE.sha256 == Value((1, 2), ONE.data).sha256 != Value((2,), bytes(8)).sha256
    assert len(ONE.sha256) == 64


def test_spans_are_half_open_and_may_have_no_end() -> None:
    spans = ((2, 4), (10, None))
    assert [p for p in range(13) if within(spans, p)] == [2, 3, 10, 11, 12]


@given(st.lists(SPAN, max_size=6))
def test_joined_spans_hold_the_same_positions(spans: list[Span]) -> None:
    together = joined(spans)
    assert {p for p in range(40) if within(together, p)} == {
        p for p in range(40) if any(a <= p and (b is None or p < b) for a, b in spans)
    }
    for (_, stop), (start, _) in pairwise(together):
        assert stop is not None
        assert stop < start


def test_interventions_cover_their_positions_in_list_order() -> None:
    everywhere, late = Intervention(edit=ZERO), Intervention(edit=ADD, spans=((5, None),))
    assert edits_at([late, everywhere], 4) == (ZERO,)
    assert edits_at([late, everywhere], 5) == (ADD, ZERO)
    assert edits_at([], 5) == ()


def test_step_keys_are_the_ids_and_how_they_were_edited() -> None:
    edits: dict[int, StepEdits] = {1: (ADD,)}
    assert step_keys([7, 8, 9], {}) == [7, 8, 9]
    keys = step_keys([7, 8, 9], edits)
    assert keys == (7, (8, ADD.digest), 9)
    assert keys == step_keys([7, 8, 9], {1: (replace(ADD),)})
    assert keys != step_keys([7, 8, 9], {1: (ZERO,)})

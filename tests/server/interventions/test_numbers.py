import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from server.errors import InvalidRequest
from server.interventions.numbers import parse_data, value_of

SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, max_side=4)
FLOATS = arrays.arrays(np.float32, SHAPES, elements=st.floats(width=32, allow_nan=False))


@given(FLOATS.filter(lambda array: bool(np.isfinite(array).all())))
@settings(deadline=None, max_examples=50)
def test_what_an_answer_writes_is_read_back_to_the_same_bits(array: np.ndarray[Any, Any]) -> None:
    encoded = base64.b64encode(array.astype("<f4").tobytes()).decode()
    as_text = json.loads(json.dumps(array.astype(float).tolist()))
    for data in (encoded, as_text):
        value = parse_data(data, array.shape)
        assert value.shape == array.shape
        assert value.data == array.astype("<f4").tobytes()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1]",
        "[1, 2, 3]",
        "[[1, 2]]",
        "[[1], [2]]",
        "[1, [2]]",
        "[1, null]",
        "[1, true]",
        '[1, "2"]',
        '["12"]',
        "[1, {}]",
        "[1, NaN]",
        "[1, Infinity]",
        "[1, 1e39]",
        "[1, -1e999]",
        f"[1, {10**400}]",
        "[" * 500 + "1" + "]" * 500,
        json.dumps(""),
        json.dumps("AAAA"),
        json.dumps("AACAPwAAgD8="[:-1]),
        json.dumps("AACAPw AAgD8="),
        json.dumps("AACAfwAAgD8="),  # an infinity
        json.dumps("ÄACAPwAAgD8="),
        json.dumps("\ud83d"),
        json.dumps("AACAPwAAgD8AAIA/"),
    ],
)
def test_q14_data_that_is_no_vector_of_two_numbers_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_data(json.loads(text), (2,))


def test_a_shape_is_met_at_every_depth() -> None:
    assert parse_data([[1, 2, 3], [4, 5, 6]], (2, 3)).shape == (2, 3)
    for data in ([[1, 2, 3], [4, 5]], [[1, 2, 3], 4], [[1, 2], [3, 4], [5, 6]], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(InvalidRequest, match="shape"):
            parse_data(data, (2, 3))


def test_more_precise_numbers_are_rounded() -> None:
    third = np.array([1 / 3])
    assert value_of(third).data == third.astype("<f4").tobytes()
    assert value_of(np.array([5e-324])).data == bytes(4)
    with pytest.raises(InvalidRequest, match="finite"):
        value_of(np.array([1e300]))
    assert parse_data([1e-300, 16777217], (2,)).data == np.array([0, 16777216], "<f4").tobytes()

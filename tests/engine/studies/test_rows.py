"""Many positions in one array: in order, padded, in float16, and their mean in float64."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine.events import StepRecord
from engine.studies.rows import Dtype, Mean, Stacked, n_keys
from model.config import GPT2Config
from model.points import Point
from tests.engine.studies.scripted import some_numbers

CONFIG = GPT2Config(n_ctx=128, n_embd=32, n_layer=2, n_head=2)
RESIDUAL, PATTERN, HEAD = Point("resid_post", 1), Point("pattern", 0), Point("z", 0, (1,))


def record(position: int, points: Sequence[Point]) -> StepRecord:
    arrays = {
        point: some_numbers(*point.shape(CONFIG, position), seed=position) for point in points
    }
    return StepRecord(index=0, position=position, token_id=0, text="", points=arrays)


def test_rows_lie_in_order_and_keys_are_padded_on_the_right() -> None:
    points, positions = (PATTERN, HEAD, RESIDUAL), (3, 7, 0)
    rows = Stacked(points, positions, CONFIG)
    records = [record(position, points) for position in positions]
    rows.take(records[:1])
    rows.take(records[1:])
    assert {str(p): a.shape for p, a in rows.arrays.items()} == {
        "pattern.0": (3, 2, 8),
        "z.0[1]": (3, 1, 16),
        "resid_post.1": (3, 32),
    }
    for index, position in enumerate(positions):
        for point in points:
            np.testing.assert_array_equal(
                rows.arrays[point][index][tuple(map(slice, point.shape(CONFIG, position)))],
                records[index].points[point],
            )
        assert not rows.arrays[PATTERN][index, :, position + 1 :].any()


def test_the_number_of_keys_is_told_where_rows_have_some() -> None:
    real = n_keys((RESIDUAL, PATTERN), (0, 3, 7))
    assert real is not None
    assert real.dtype == np.int64
    assert real.tolist() == [1, 4, 8]
    assert n_keys((RESIDUAL, HEAD), (0, 3, 7)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_mean_is_summed_in_float64(dtype: Dtype) -> None:
    large = [np.float32(v) for v in (1e8, 1.0, -1e8, 1.0)]  # float32 would lose the ones
    records = [
        StepRecord(
            index=0,
            position=p,
            token_id=0,
            text="",
            points={RESIDUAL: np.full(32, value, np.float32)},
        )
        for p, value in enumerate(large)
    ]
    rows = Mean((RESIDUAL,), range(4), CONFIG, dtype)
    rows.take(records[:3])
    rows.take(records[3:])
    assert rows.arrays[RESIDUAL].dtype == dtype
    np.testing.assert_array_equal(rows.arrays[RESIDUAL], np.full(32, 0.5))


def test_float16_rounds_and_what_it_cannot_hold_is_infinite() -> None:
    value = np.linspace(-70_000, 70_000, 32, dtype=np.float32)
    one = StepRecord(index=0, position=0, token_id=0, text="", points={RESIDUAL: value})
    rows = Stacked((RESIDUAL,), (0,), CONFIG, np.float16)
    rows.take([one])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rows.arrays[RESIDUAL][0], value.astype(np.float16))
    assert np.isinf(rows.arrays[RESIDUAL]).sum() == 2

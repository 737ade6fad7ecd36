"""Edits whose effect the plain reference can tell: a step made to look like another token's."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from engine.events import StepRecord
from model.batch import Floats
from model.points import LENS_TOP, Point
from sessions.edits import Edit, Intervention, Span, StepEdits, Value
from tests.agreement import assert_agrees
from tests.engine.rig import LIVELY
from tests.reference import reference_points


def value(array: Floats) -> Value:
    return Value(array.shape, np.ascontiguousarray(array, "<f4").tobytes())


def disguise(token_id: int) -> Edit:
    """The step's token row becomes that of another token."""
    row = LIVELY.tensors["wte.weight"][token_id].numpy()
    return Edit(point="wte", op="replace", value=value(row))


def disguised(token_id: int, *spans: Span) -> Intervention:
    """Steps at `spans`, or all, as if another token were stepped there."""
    return Intervention(edit=disguise(token_id), spans=spans or None)


def assert_looks_like(
    records: Sequence[StepRecord],
    history: Sequence[int],
    edits: Mapping[int, StepEdits] | None = None,
) -> None:
    """Every point of every record is what the reference has for `history`, edited so."""
    expected = reference_points(LIVELY, history, edits=edits)
    assert any(record.points for record in records)
    for record in records:
        for point, array in record.points.items():
            assert array.dtype == np.float32
            assert array.shape == point.shape(LIVELY.config, record.position)
            told, row = _comparable(point, array, expected[str(point.whole)][record.position])
            assert_agrees(told, row, what=f"{point} at {record.position}")


def _comparable(point: Point, array: Floats, row: Tensor) -> tuple[Floats, Floats]:
    """What a record tells, and the reference's numbers for the same."""
    if point.name == "lens":
        logits = (LIVELY.tensors["wte.weight"] @ row).numpy()
        best = np.sort(logits)[::-1][:LENS_TOP]
        ids = array[0].astype(int)
        return np.stack([array[1], logits[ids]]), np.stack([best, best])
    if point.name in ("scores", "pattern"):
        row = row[:, : array.shape[-1]]
    return array, point.select(row.numpy())

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load

from engine.events import StepRecord
from model.config import SIZES
from model.points import Point, all_points
from server.tensors import Array, frame, saved, stacked
from server.wire import Message, Tensor
from tests.server.decoding import metadata

TINY = SIZES["tiny"]
DTYPES: st.SearchStrategy[np.dtype[Any]] = st.sampled_from(
    [np.dtype("<f4"), np.dtype("<f2"), np.dtype("<i8"), np.dtype(">f4")]
)
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter("__metadata__".__ne__)


@given(
    st.dictionaries(NAMES, arrays.arrays(DTYPES, SHAPES), max_size=4),
    st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
)
@settings(deadline=None, max_examples=30)
def test_the_library_reads_what_is_saved(tensors: dict[str, Array], about: dict[str, str]) -> None:
    blob = saved(tensors, about)
    read = load(blob)
    assert set(read) == set(tensors)
    for name, array in tensors.items():
        assert read[name].shape == array.shape
        little = array.astype(array.dtype.newbyteorder("<"))
        assert read[name].tobytes() == little.tobytes()
    assert metadata(blob) == about


def test_tensors_keep_their_order_and_may_be_views() -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    blob = saved({"b": table.T, "a": table[:, 1]}, {})
    size = int.from_bytes(blob[:8], "little")
    assert list(json.loads(blob[8 : 8 + size])) == ["__metadata__", "b", "a"]
    assert (load(blob)["b"] == table.T).all()
    assert load(blob)["a"].tolist() == [1, 5, 9]


@pytest.mark.parametrize("text", ['\u2028\u2029\u0085\r\n\0"\\{', "😀", ""])
def test_s13_a_frame_is_its_length_and_a_file_with_the_record_as_text(text: str) -> None:
    row = np.ones(3, dtype=np.float32)
    data = frame(Message({"text": text}, {"ln_f": Tensor(row, ("n_embd",))}))
    (size,) = struct.unpack("<Q", data[:8])
    assert size == len(data) - 8
    assert json.loads(metadata(data[8:])["record"]) == {"text": text}
    assert load(data[8:])["ln_f"].tolist() == [1, 1, 1]


def test_a_terminal_frame_has_no_tensors() -> None:
    data = frame(Message({"object": "done"}))
    assert load(data[8:]) == {}
    assert json.loads(metadata(data[8:])["record"]) == {"object": "done"}


def step(position: int, points: tuple[Point, ...]) -> StepRecord:
    rng = np.random.default_rng(position)
    rows = {p: rng.standard_normal(p.shape(TINY, position), dtype=np.float32) for p in points}
    return StepRecord(index=0, position=position, token_id=50256 - position, text="", points=rows)


@given(st.lists(st.integers(0, 1023), min_size=1, max_size=5, unique=True))
@settings(deadline=None, max_examples=15)
def test_records_are_stacked_with_positions_first(positions: list[int]) -> None:
    units = Point("scores", 0, (1,)), Point("logits", None, (318, 262))
    points = tuple(p for p in all_points(TINY) if p.name != "logits") + units
    records = [step(position, points) for position in positions]
    blob = stacked(records, points, {"object": "activations", "text": "\u2028"}, TINY)
    read = load(blob)
    assert set(read) == {str(p) for p in points} | {"positions", "token_ids", "n_keys"}
    assert read["positions"].tolist() == positions
    assert read["token_ids"].tolist() == [50256 - position for position in positions]
    assert read["n_keys"].tolist() == [position + 1 for position in positions]
    assert {read[name].dtype for name in ("positions", "token_ids", "n_keys")} == {np.dtype("i8")}
    for point in points:
        tensor = read[str(point)]
        assert tensor.dtype == np.float32
        assert tensor.shape == (len(positions), *point.shape(TINY, max(positions)))
        for row, record in zip(tensor, records, strict=True):
            real = record.points[point]
            assert (row[..., : real.shape[-1]] == real).all()
            assert not row[..., real.shape[-1] :].any()
    assert json.loads(metadata(blob)["answer"]) == {"object": "activations", "text": "\u2028"}


def test_a_stack_without_keys_has_no_number_of_keys() -> None:
    points = (Point("resid_post", 1),)
    blob = stacked([step(0, points), step(1, points)], points, {}, TINY)
    assert set(load(blob)) == {"resid_post.1", "positions", "token_ids"}

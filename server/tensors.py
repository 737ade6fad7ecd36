"""Tensors as safetensors: one frame of a stream, one stacked answer. Any thread; numpy, no torch.

    uint64 n | n bytes: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}} | numbers

Written by hand, in the order given: the library copies each tensor three times and sorts them by
name. It takes four times as long for 13 rows of 768, and fifteen times for one of logits.
https://huggingface.co/docs/safetensors/index#format
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from engine.events import StepRecord
from model.points import Point
from server.wire import Message, dumps

Array = npt.NDArray[Any]
Buffer = bytes | memoryview

_DTYPES: Mapping[np.dtype[Any], str] = {
    np.dtype("<f4"): "F32",
    np.dtype("<f2"): "F16",
    np.dtype("<i8"): "I64",
}
_ALIGNMENT = 8  # of the numbers, as the format asks: the header is filled up with spaces


def saved(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """One file of safetensors. Arrays are float32, float16 or int64, any strides."""
    return b"".join(_parts(tensors, metadata))


def frame(message: Message) -> bytes:
    """One record of a stream of frames: its bytes' number, and a file of its tensors."""
    tensors = {name: tensor.array for name, tensor in (message.tensors or {}).items()}
    parts = _parts(tensors, {"record": dumps(message.head).decode()})
    return b"".join([_uint64(sum(memoryview(part).nbytes for part in parts)), *parts])


def stacked(
    records: Sequence[StepRecord], points: Iterable[Point], answer: Mapping[str, Any]
) -> bytes:
    """Records as one file: each point as one tensor with an axis of positions first.

    Without records there are no points: their shapes are not known.

    `positions` and `token_ids` are int64 [n]. What has an axis of keys is filled up on the right
    with zeros; then `n_keys`, int64 [n], tells how many are real. `answer` is what JSON would say
    beside the records: text in the metadata.
    """
    tensors: dict[str, Array] = {
        "positions": np.array([record.position for record in records], dtype="<i8"),
        "token_ids": np.array([record.token_id for record in records], dtype="<i8"),
    }
    for point in points if records else ():
        rows = [record.points[point] for record in records]
        tensors[str(point)] = _stack(rows)
        if "key" in point.axes:
            tensors["n_keys"] = np.array([row.shape[-1] for row in rows], dtype="<i8")
    return saved(tensors, {"answer": dumps(answer).decode()})


def _stack(rows: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    *shape, _ = rows[0].shape
    stack = np.zeros((len(rows), *shape, max(row.shape[-1] for row in rows)), dtype="<f4")
    for place, row in zip(stack, rows, strict=True):
        place[..., : row.shape[-1]] = row
    return stack


def _parts(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> list[Buffer]:
    header: dict[str, Any] = {"__metadata__": metadata}
    numbers: list[Buffer] = []
    start = 0
    for name, tensor in tensors.items():
        array = np.asarray(tensor, dtype=tensor.dtype.newbyteorder("<"), order="C")
        stop = start + array.nbytes
        about = {"dtype": _DTYPES[array.dtype], "shape": array.shape, "data_offsets": (start, stop)}
        header[name] = about
        numbers.append(array.data)
        start = stop
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return [_uint64(len(text)), text, *numbers]


def _uint64(number: int) -> bytes:
    return struct.pack("<Q", number)

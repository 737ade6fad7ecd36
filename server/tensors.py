"""Tensors as safetensors: one frame of a stream, one stacked answer. Any thread; numpy, no torch.

    uint64 n | n bytes: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}} | numbers

Written by hand, in the order given: the library copies each tensor three times and sorts them by
name. It takes four times as long for 13 rows of 768, and fifteen times for one of logits.
https://huggingface.co/docs/safetensors/index#format
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from engine.events import StepRecord
from engine.studies.rows import Stacked, n_keys
from model.config import GPT2Config
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
    tensors = {name: tensor.array for name, tensor in message.all_tensors.items()}
    parts = _parts(tensors, {"record": dumps(message.head).decode()})
    return b"".join([_uint64(sum(memoryview(part).nbytes for part in parts)), *parts])


def stacked(
    records: Sequence[StepRecord],
    points: Sequence[Point],
    answer: Mapping[str, Any],
    config: GPT2Config,
) -> bytes:
    """Records as one file: each point as one tensor with an axis of positions first.

    `positions` and `token_ids` are int64 [n]. What is ragged is filled up on the right with zeros;
    then `n_keys`, int64 [n], tells how many are real. Without records there are no points. `answer`
    is what JSON would say beside the records: text in the metadata.
    """
    positions = [record.position for record in records]
    tensors: dict[str, Array] = {
        "positions": np.array(positions, dtype=np.int64),
        "token_ids": np.array([record.token_id for record in records], dtype=np.int64),
    }
    if records:
        rows = Stacked(points, positions, config)
        rows.take(records)
        tensors |= {str(point): array for point, array in rows.arrays.items()}
        if (real := n_keys(points, positions)) is not None:
            tensors["n_keys"] = real
    return saved(tensors, {"answer": dumps(answer).decode()})


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

"""Records of any form, read back by other means than they are written with."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

from server.negotiation import Form
from tests.server.hand import sse

STREAMS = [Form.SSE, Form.NDJSON, Form.FRAMES]


@dataclass(frozen=True, slots=True)
class Told:
    """What a record says, and its tensors."""

    record: dict[str, Any]
    points: dict[str, npt.NDArray[Any]]


def accepting(form: Form) -> dict[str, str]:
    return {"accept": form.value}


def same(some: list[Told], others: list[Told]) -> bool:
    """Whether they are equal, to the last bit of their numbers."""
    return [_bits(one) for one in some] == [_bits(one) for one in others]


def _bits(one: Told) -> object:
    points = {name: (array.shape, array.tobytes()) for name, array in one.points.items()}
    return one.record, points


def told(form: Form, body: bytes) -> list[Told]:
    """Every record; of a stream the terminal one too, without which it is no stream."""
    if form is Form.JSON:
        return [_from_json(record) for record in json.loads(body)["records"]]
    records = list(_FORMS[form](body))
    assert all("object" in one.record for one in records[:-1])
    last = records[-1].record
    assert last.get("object") == "done" or "error" in last
    assert records[-1].points == {}
    return records


def _events(body: bytes) -> Iterator[Told]:
    payloads = sse(body)
    if payloads[-1] == "[DONE]":
        assert json.loads(payloads[-2])["object"] == "done"
        payloads.pop()
    return (_from_json(json.loads(payload)) for payload in payloads)


def _lines(body: bytes) -> Iterator[Told]:
    *lines, rest = body.split(b"\n")
    assert rest == b""
    return (_from_json(json.loads(line)) for line in lines)


def _frames(body: bytes) -> Iterator[Told]:
    while body:
        size = int.from_bytes(body[:8], "little")
        blob, body = body[8 : 8 + size], body[8 + size :]
        assert len(blob) == size
        yield Told(json.loads(metadata(blob)["record"]), load(blob))


def metadata(blob: bytes) -> dict[str, str]:
    """Of a file of safetensors."""
    size = int.from_bytes(blob[:8], "little")
    assert size % 8 == 0
    return dict(json.loads(blob[8 : 8 + size])["__metadata__"])


def _from_json(record: dict[str, Any]) -> Told:
    points = {name: _numbers(tensor) for name, tensor in record.pop("points", {}).items()}
    return Told(record, points)


def _numbers(tensor: dict[str, Any]) -> npt.NDArray[Any]:
    data = tensor["data"]
    if isinstance(data, str):
        return np.frombuffer(base64.b64decode(data), dtype="<f4").reshape(tensor["shape"])
    array = np.array(data, dtype=np.float32)  # null is NaN
    assert list(array.shape) == tensor["shape"]
    return array


_FORMS = {Form.SSE: _events, Form.NDJSON: _lines, Form.FRAMES: _frames}

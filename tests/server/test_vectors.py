"""Vectors: files of any kind, what is kept of them, within which bounds."""

import asyncio
import json
import struct
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from server.answers import VectorList
from server.errors import InvalidRequest, VectorNotFound, VectorsFull
from server.interventions.vectors import MAX_TENSORS, PAGE, Vector, Vectors, parse_file
from sessions.edits import Value
from tests.server.serving import Serving, error_of, served, serving

ONES = np.ones(3, np.float32)
FILE = {"content-type": "application/octet-stream"}


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def vector(*numbers: float) -> Vector:
    return Vector("v", Value((len(numbers),), np.array(numbers, "<f4").tobytes()))


def by_id(*vectors: Vector) -> dict[str, Vector]:
    return {one.id: one for one in vectors}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 7,
        b"x" * 8,
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 2**20 + 1) + b" " * (2**20 + 1),
        struct.pack("<Q", 100) + b"{}",
        file_of(b"{"),
        file_of(b"[]"),
        file_of(b"null"),
        file_of(b"\xff\xfe"),
        file_of({}),
        file_of({"__metadata__": {"a": "b"}}),
        file_of({"a": tensor(shape=[2**62, 4], offsets=[0, 0])}),
        file_of({"a": tensor(shape=[-1])}, bytes(4)),
        file_of({"a": tensor(offsets=[4, 0])}, bytes(4)),
        file_of({"a": tensor(offsets=[0, 8])}, bytes(4)),
        file_of({"a": tensor()}, bytes(400)),
        file_of({"a": tensor(shape=[2], offsets=[0, 8]), "b": tensor(offsets=[4, 8])}, bytes(8)),
        file_of(b'{"a": {}, "a": ' + json.dumps(tensor()).encode() + b"}", bytes(4)),
        file_of({"a": tensor(shape=[])}, bytes(4)),
        file_of({"a": tensor(shape=[0], offsets=[0, 0])}),
        file_of({"a": tensor(shape=[1] * 9)}, bytes(4)),
        file_of({"a": tensor("I32")}, bytes(4)),
        file_of({"a": tensor("BOOL", [4])}, bytes(4)),
        file_of({"a": tensor("F8_E4M3", [4])}, bytes(4)),
        file_of({"a": tensor()}, struct.pack("<f", float("nan"))),
        file_of({"a": tensor("F64", offsets=[0, 8])}, struct.pack("<d", 1e300)),
        file_of({"a": tensor("F16", [2])}, struct.pack("<ee", 1, float("inf"))),
        file_of({"n" * 257: tensor()}, bytes(4)),
        save({str(i): ONES[:1] for i in range(MAX_TENSORS + 1)}),
        b"\x80\x04" + b"pickle" * 9,
    ],
)
def test_q14_files_that_hold_no_vectors_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_file(data)


def test_every_floating_type_becomes_float32() -> None:
    numbers = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    found = [parse_file(save_torch({"a": numbers.to(dtype)})) for dtype in types]
    assert len({id_ for one in found for id_ in one}) == 1
    (kept,) = found[0].values()
    assert kept.value == Value((2, 2), numbers.numpy().astype("<f4").tobytes())


def test_an_id_tells_numbers_and_shape() -> None:
    row, column = np.ones((1, 4), np.float32), np.ones((4, 1), np.float32)
    found = parse_file(save({"row": row, "column": column, "again": row, "other": 2 * row}))
    assert sorted(one.name for one in found.values()) == ["column", "other", "row"]
    assert all(id_.startswith("vec_") and len(id_) == 36 for id_ in found)


def test_what_is_kept_is_bounded_and_all_or_nothing() -> None:
    kept = Vectors(3 * PAGE)
    kept.put(by_id(vector(1), vector(2)))
    kept.put(by_id(vector(1), vector(2)))
    assert kept.held_bytes == 2 * PAGE
    with pytest.raises(VectorsFull) as raised:
        kept.put(by_id(vector(2), vector(3), vector(4)))
    assert (raised.value.n_bytes, raised.value.max_bytes) == (4 * PAGE, 3 * PAGE)
    assert kept.all().keys() == by_id(vector(1), vector(2)).keys()
    kept.delete(vector(1).id)
    kept.put(by_id(vector(3), vector(2)))
    assert kept.held_bytes == 2 * PAGE
    with pytest.raises(VectorNotFound):
        kept.get(vector(1).id)
    large = Vectors(2 * PAGE)
    large.put(by_id(vector(*range(PAGE // 4 + 1))))
    assert large.held_bytes == PAGE + 4


def test_owners_see_their_own_and_share_one_budget() -> None:
    kept = Vectors(2 * PAGE)
    kept.put(by_id(vector(1)), "a")
    kept.put(by_id(vector(1)), "b")
    with pytest.raises(VectorsFull):
        kept.put(by_id(vector(2)), "c")
    with pytest.raises(VectorNotFound):
        kept.get(vector(1).id, "c")
    kept.delete(vector(1).id, "a")
    assert (kept.all("a"), kept.all("b")) == ({}, by_id(vector(1)))


async def put(server: Serving, data: bytes, **headers: str) -> httpx.Response:
    return await server.client.put("/v1/vectors", content=data, headers=FILE | headers)


@served
async def test_vectors_over_http(server: Serving) -> None:
    data = save({"b": np.arange(4, dtype=np.float32).reshape(2, 2), "a": ONES})
    first = await put(server, data)
    told = first.json()["data"]
    assert first.status_code == 200
    VectorList.model_validate(first.json(), strict=True)
    assert [(one["name"], one["shape"], one["bytes"]) for one in told] == [
        ("a", [3], 12),
        ("b", [2, 2], 16),
    ]
    assert {(one["object"], one["dtype"]) for one in told} == {("vector", "float32")}
    again = await put(server, data, **{"content-type": "application/x-safetensors"})
    listed = await server.client.get("/v1/vectors")
    assert first.json() == again.json() == listed.json()
    path = f"/v1/vectors/{told[0]['id']}"
    assert (await server.client.get(path)).json() == told[0]
    gone = await server.client.delete(path)
    assert gone.json() == {"id": told[0]["id"], "object": "vector.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        answer = await server.client.request(method, path)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "vector_not_found")
    assert (await server.client.get("/v1/vectors")).json()["data"] == told[1:]


@served
async def test_q14_a_bad_file_is_a_400_and_keeps_nothing(server: Serving) -> None:
    for data in (b"", b"{}", file_of({"a\ud83d": tensor()}, bytes(4)), save({"a": ONES})[:-1]):
        answer = await put(server, data)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request")
    assert (await server.client.get("/v1/vectors")).json()["data"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json"},
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-encoding": "gzip"},
    ],
)
def test_only_files_are_read(headers: dict[str, str]) -> None:
    async def main() -> None:
        async with serving() as server:
            answer = await put(server, save({"a": ONES}), **headers)
            assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
            assert "application/octet-stream" in error_of(answer)["message"]

    asyncio.run(main())


def test_a_full_store_is_a_507() -> None:
    async def main() -> None:
        async with serving(vector_budget=PAGE) as server:
            assert (await put(server, save({"a": ONES}))).status_code == 200
            full = await put(server, save({"b": 2 * ONES}))
            told = error_of(full)
            assert (full.status_code, told["code"]) == (507, "vectors_full")
            assert (told["n_bytes"], told["max_bytes"]) == (2 * PAGE, PAGE)

    asyncio.run(main())

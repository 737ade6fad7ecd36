"""What tests of interventions share."""

from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from tests.server.serving import Serving, error_of, vector

WIDTH = 32
DIRECTION = np.random.default_rng(7).normal(size=WIDTH).astype(np.float32)
Floats = npt.NDArray[np.float32]
Records = list[dict[str, Any]]


async def steps(server: Serving, session_id: str, verb: str = "append", **body: Any) -> Records:
    answer = await server.post(f"/v1/sessions/{session_id}/{verb}", **body)
    assert answer.status_code in (200, 201), answer.text
    records: Records = answer.json()["records"]
    return records


async def kept_vector(server: Serving, array: Floats) -> str:
    headers = {"content-type": "application/octet-stream"}
    content = save({"v": array})
    answer = await server.client.put("/v1/vectors", content=content, headers=headers)
    return str(answer.json()["data"][0]["id"])


async def state(server: Serving, session_id: str) -> dict[str, Any]:
    told: dict[str, Any] = (await server.client.get(f"/v1/sessions/{session_id}")).json()
    return told


async def refused(
    server: Serving, session_id: str, verb: str = "append", **body: Any
) -> dict[str, Any]:
    answer = await server.post(f"/v1/sessions/{session_id}/{verb}", **body)
    told = error_of(answer)
    assert told["param"] == "interventions", told
    return told | {"status": answer.status_code}


def tensor(record: dict[str, Any], point: str) -> Floats:
    shape = record["points"][point]["shape"]
    return vector(record, point).reshape(shape)


def scaled(positions: str) -> list[dict[str, Any]]:
    return [{"point": "z.0", "op": "scale", "scale": 0, "positions": positions}]


def replaced(**value: Any) -> list[dict[str, Any]]:
    return [{"point": "resid_pre.1", "op": "replace", "value": value}]

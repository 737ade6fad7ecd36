"""Weights by name, over HTTP."""

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load

from tests.server.serving import Serving, error_of, served, serving

PATH = "/v1/models/random:tiny/parameters"


async def fetched(server: Serving, names: str) -> dict[str, npt.NDArray[np.float32]]:
    answer = await server.client.get(PATH, params={"names": names})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-safetensors"
    return load(answer.content)


@served
async def test_tensors_and_rows_come_under_the_names_asked_for(server: Serving) -> None:
    names = "wte[318],wte.weight[318],wpe[0],h.0.ln_1.weight,h.1.mlp.c_proj.weight[7],ln_f.bias,wpe"
    found = await fetched(server, names)
    held = server.service.engine.model.parameters
    assert found.keys() == set(names.split(","))
    assert found["wte[318]"].tobytes() == held["wte.weight"][318].numpy().tobytes()
    assert found["wte.weight[318]"].tobytes() == found["wte[318]"].tobytes()
    assert found["wpe"].tobytes() == held["wpe.weight"].numpy().tobytes()
    assert found["wpe[0]"].tobytes() == found["wpe"][0].tobytes()
    dense = held["h.1.mlp.c_proj.weight"]
    assert dense.shape == (128, 32)
    assert found["h.1.mlp.c_proj.weight[7]"].tobytes() == dense[7].numpy().tobytes()
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}


@served
async def test_every_weight_can_be_had(server: Serving) -> None:
    held = server.service.engine.model.parameters
    found = await fetched(server, ",".join(held))
    assert {name: array.shape for name, array in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in held.items()
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "no parameter ''"),
        ("wte,", "no parameter ''"),
        ("h.0.ln_1.wieght", "did you mean h.0.ln_1.weight"),
        ("h.2.ln_1.weight", "no parameter"),
        ("wte[50257]", "rows 0 to 50256"),
        ("wpe[-1]", "no parameter"),
        ("wte[1:2]", "no parameter"),
        ("wte[٣]", "no parameter"),
        ("wte[1][2]", "no parameter"),
        ("wte[99999999999]", "no parameter"),
        ("ln_f.bias[0]", "is a vector"),
        ("__metadata__", "no parameter"),
        ("../wte", "no parameter"),
        ("w" * 30_000, "no parameter"),
        ("," * 9_000, "no parameter"),
    ],
)
def test_q14_names_that_are_none(names: str, message: str) -> None:
    async def main() -> None:
        async with serving() as server:
            answer = await server.client.get(PATH, params={"names": names})
            told = error_of(answer)
            assert (answer.status_code, told["code"]) == (400, "invalid_request")
            assert told["param"] == "names"
            assert message in told["message"]

    asyncio.run(main())


@served
async def test_requests_that_name_nothing_or_another_model(server: Serving) -> None:
    for params in ({}, {"names": "w" * 40_000}):
        answer = await server.client.get(PATH, params=params)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "names")
    other = await server.client.get("/v1/models/gpt3/parameters", params={"names": "wte[0]"})
    assert (other.status_code, error_of(other)["code"]) == (404, "model_not_found")


def test_too_many_bytes_are_refused_before_they_are_made() -> None:
    async def main() -> None:
        async with serving(max_response_bytes=1000) as server:
            assert len(await fetched(server, ",".join(f"wte[{i}]" for i in range(7)))) == 7
            names = ",".join(f"wte[{i}]" for i in range(8))
            answer = await server.client.get(PATH, params={"names": names})
            told = error_of(answer)
            assert (answer.status_code, told["code"]) == (400, "response_too_large")
            assert (told["param"], told["n_bytes"], told["max_bytes"]) == ("names", 1024, 1000)
            assert server.service.answers.held_bytes == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "mode", [{"dtype": "bfloat16"}, {"dtype": "int8"}, {"batch_invariant": True}]
)
def test_what_a_mode_does_not_hold_is_refused_with_the_reason(mode: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving(**mode) as server:
            held = await fetched(server, "wte[3],wpe[3],h.0.attn.c_attn.bias,ln_f.weight")
            assert len(held) == 4
            names = "h.0.attn.c_attn.weight"
            answer = await server.client.get(PATH, params={"names": names})
            assert (answer.status_code, error_of(answer)["param"]) == (400, "names")
            assert "--dtype float32" in error_of(answer)["message"]

    asyncio.run(main())

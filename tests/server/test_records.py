"""What records say, in every form."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from model.config import SIZES
from server import answers
from server.negotiation import Form
from tests.lively import lively_checkpoint
from tests.server.decoding import STREAMS, accepting, same, told
from tests.server.serving import Serving, error_of, served, serving, vector


@served
async def test_stream_and_answer_say_the_same(server: Serving) -> None:
    async def generate(form: Form) -> bytes:
        path = f"/v1/sessions/{await server.open(prompt='Hello')}/generate"
        body = {"max_tokens": 5, "seed": 3, "logprobs": True, "top_logprobs": 2}
        answer = await server.client.post(path, json=body, headers=accepting(form))
        assert answer.status_code == 200
        return answer.content

    plain = await generate(Form.JSON)
    for form in STREAMS:
        *records, done = told(form, await generate(form))
        assert same(records, told(Form.JSON, plain))
        assert done.record["session"]["past_length"] == 6
    for record in json.loads(plain)["records"]:
        answers.Record.model_validate(record, strict=True)
        assert len(record["top_logprobs"]) == 2
        assert record["logprob"] < 0


@served
async def test_logprobs_are_null_at_position_0(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open()}/append"
    told = await server.post(path, token_ids=[1, 2], logprobs=True, top_logprobs=1)
    first, second = told.json()["records"]
    assert (first["logprob"], first["top_logprobs"]) == (None, None)
    assert second["logprob"] < 0
    assert len(second["top_logprobs"]) == 1


@served
async def test_n01_logprobs_stay_finite(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open(token_ids=[1])}/generate"
    bias = {str(i): -100 for i in range(10)}
    body = {"max_tokens": 2, "logprobs": True, "top_logprobs": 20, "top_k": 1, "logit_bias": bias}
    for form in (Form.JSON, *STREAMS):
        answer = await server.client.post(path, json=body, headers=accepting(form))
        records = [one.record for one in told(form, answer.content)][:2]
        numbers = [top["logprob"] for record in records for top in record["top_logprobs"]]
        assert len(numbers) == 40
        assert np.isfinite(numbers).all()


@served
async def test_n04_tiny_temperatures_are_greedy(server: Serving) -> None:
    def body(temperature: float) -> dict[str, Any]:
        return {"max_tokens": 4, "temperature": temperature, "points": []}

    ids = []
    for temperature in (0, -0.0, 5e-324, 1e-38, 9e-5):
        path = f"/v1/sessions/{await server.open(token_ids=[1])}/generate"
        told = (await server.post(path, **body(temperature))).json()
        ids.append([r["token"]["id"] for r in told["records"]])
    assert ids == [ids[0]] * 5


@served
async def test_points_at_narrows_and_aliases_are_named(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open()}/append"
    body = {"token_ids": [1, 2, 3], "points": ["hidden_states[0]", "logits"], "points_at": "1:3"}
    told = (await server.post(path, encoding_format="float", **body)).json()
    assert told["records"][0]["points"] == {}
    for record in told["records"][1:]:
        assert set(record["points"]) == {"resid_pre.0", "logits"}
        assert record["points"]["logits"]["shape"] == [50257]
        assert record["points"]["logits"]["axes"] == ["n_vocab"]
        assert len(record["points"]["logits"]["data"]) == 50257
    assert told["aliases"] == {"hidden_states[0]": "resid_pre.0"}


@served
async def test_t06_characters_over_several_tokens(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open()}/append"
    told = (await server.post(path, token_ids=[8582, 97, 245])).json()
    assert [record["text"] for record in told["records"]] == ["", "", "🤗"]
    assert b"".join(bytes(r["token"]["bytes"]) for r in told["records"]).decode() == "🤗"


@served
async def test_prepend_bos_is_echoed_and_only_at_the_start(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open()}/append"
    told = (await server.post(path, prompt="Hello", prepend_bos=True)).json()
    assert [r["token"]["id"] for r in told["records"]] == [50256, 15496]
    again = await server.post(path, prompt="Hello", prepend_bos=True)
    assert (again.status_code, error_of(again)["param"]) == (400, "prepend_bos")


def test_p17_greedy_takes_the_argmax_of_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On lively weights, where each row has another one."""
    weights = lively_checkpoint(SIZES["tiny"])
    monkeypatch.setattr("server.loading.load_checkpoint", lambda *_, **__: weights)

    async def main() -> None:
        async with serving() as server:
            path = f"/v1/sessions/{await server.open()}"
            body = {"token_ids": [15496, 11, 995, 318, 257], "points": ["logits"], "points_at": "4"}
            prompt = (await server.post(f"{path}/append", **body)).json()["records"]
            options = {"max_tokens": 8, "temperature": 0, "points": ["logits"]}
            told = (await server.post(f"{path}/generate", **options)).json()["records"]
            rows = [vector(record, "logits") for record in (prompt[-1], *told)]
            assert {row.size for row in rows} == {50257}
            ids = [record["token"]["id"] for record in told]
            assert ids == [int(row.argmax()) for row in rows[:-1]]
            assert len(set(ids)) > 4
            assert all(0 <= token_id < 50257 for token_id in ids)

    asyncio.run(main())

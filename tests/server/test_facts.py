"""Tokens, models, capabilities, probes, OpenAPI."""

from typing import get_args

from server import model_answers as answers
from server.settings import Settings
from sessions.edits import Op
from tests.server.serving import Serving, error_of, served


@served
async def test_t01_tokenize_and_detokenize_as_vllm(server: Serving) -> None:
    told = (await server.post("/tokenize", prompt="Hello world", return_token_strs=True)).json()
    assert told == {
        "count": 2,
        "max_model_len": 1024,
        "tokens": [15496, 995],
        "token_strs": ["Hello", "Ġworld"],
    }
    literal = (await server.post("/tokenize", prompt="a<|endoftext|>b")).json()
    assert literal["tokens"] == [64, 27, 91, 437, 1659, 5239, 91, 29, 65]
    special = {"prompt": "a<|endoftext|>b", "allow_special": True, "model": "random:tiny"}
    assert (await server.post("/tokenize", **special)).json()["tokens"] == [64, 50256, 65]
    assert (await server.post("/tokenize", prompt="")).json()["count"] == 0
    text = (await server.post("/detokenize", tokens=[47249, 222, 50256])).json()
    assert text == {"prompt": "😀<|endoftext|>"}
    bad = await server.post("/detokenize", tokens=[1, 50257])
    assert (error_of(bad)["param"], error_of(bad)["index"]) == ("tokens", 1)
    long = await server.post("/tokenize", prompt=" " * 999_999 + "x")
    assert error_of(long)["code"] == "context_length_exceeded"
    other = await server.post("/tokenize", prompt="a", model="gpt-4")
    assert (other.status_code, error_of(other)["code"]) == (404, "model_not_found")


@served
async def test_models_and_capabilities(server: Serving) -> None:
    listed = (await server.client.get("/v1/models")).json()
    answers.ModelList.model_validate(listed, strict=True)
    card = (await server.client.get("/v1/models/random:tiny")).json()
    assert listed["data"] == [card]
    assert (card["id"], card["source"]) == ("random:tiny", "random")
    assert (await server.client.get("/v1/models/a/b")).status_code == 404
    told = (await server.client.get("/v1/capabilities")).json()
    assert set(told) == set(answers.Capabilities.model_fields)
    assert told["fingerprint"] == card["fingerprint"]
    assert told["points"][:3] == ["wte", "wpe", "embedding"]
    for facts in (card, told):
        precision = (facts["dtype"], facts["kv_dtype"], facts["batch_invariant"])
        assert precision == ("float32", "float32", False)
    assert set(told["kv"]) == set(answers.KVBytes.model_fields)
    assert told["kv"]["bytes_per_token"] == 2 * 2 * 32 * 4
    assert told["limits"]["max_body_bytes"] == Settings().max_body_bytes


@served
async def test_capabilities_say_what_can_be_edited_and_what_costs_more(server: Serving) -> None:
    told = (await server.client.get("/v1/capabilities")).json()
    answers.Capabilities.model_validate(told, strict=True)
    assert told["gradients"] is False
    editing = told["interventions"]
    assert tuple(editing["ops"]) == get_args(Op)
    assert set(told["points"]) - set(editing["points"]) == {"lens.0", "lens.1", "logits"}
    assert {name.split(".")[0] for name in told["points_that_cost_extra"]} == {
        "scores",
        "pattern",
        "head_out",
        "lens",
    }
    assert told["limits"]["vector_budget"] == Settings().vector_budget


@served
async def test_probes(server: Serving) -> None:
    assert (await server.client.get("/health")).json() == {"status": "ok"}
    assert (await server.client.get("/ready")).json() == {"status": "ready"}
    assert set((await server.client.get("/version")).json()) == {"version"}
    await server.post(f"/v1/sessions/{await server.open(token_ids=[1])}/generate", max_tokens=2)
    text = (await server.client.get("/metrics")).text
    assert 'stepscope:request_success_total{finished_reason="length"} 1.0' in text
    assert "stepscope:generation_tokens_total 2.0" in text
    assert "stepscope:sessions 1.0" in text


@served
async def test_openapi_documents_envelopes_and_no_422(server: Serving) -> None:
    told = (await server.client.get("/openapi.json")).json()
    for path, verbs in told["paths"].items():
        for verb, operation in verbs.items():
            assert "422" not in operation["responses"], (verb, path)
            if path != "/metrics":
                assert {"4XX", "5XX"} <= set(operation["responses"]), (verb, path)
    assert "HTTPValidationError" not in told["components"]["schemas"]

"""What no request may pass: the context, an expected length, the size of an answer."""

import asyncio
from typing import Any

import pytest

from tests.server.serving import Serving, error_of, served, serving

SSE = {"accept": "text/event-stream"}
NDJSON = {"accept": "application/x-ndjson"}


# What each verb answers to n tokens; generate begins on a session that has one.
EDGES = [
    ("open", 0, 400, "empty_input"),
    ("open", 1, 201, None),
    ("open", 1023, 201, None),
    ("open", 1024, 201, None),
    ("open", 1025, 400, "context_length_exceeded"),
    ("append", 0, 400, "empty_input"),
    ("append", 1, 200, None),
    ("append", 1023, 200, None),
    ("append", 1024, 200, None),
    ("append", 1025, 400, "context_length_exceeded"),
    ("generate", 0, 400, "invalid_request"),
    ("generate", 1, 200, None),
    ("generate", 1023, 200, None),
    ("generate", 1024, 400, "context_length_exceeded"),
    ("generate", 1025, 400, "context_length_exceeded"),
    ("embed", 0, 400, "empty_input"),
    ("embed", 1, 200, None),
    ("embed", 1023, 200, None),
    ("embed", 1024, 200, None),
    ("embed", 1025, 400, "context_length_exceeded"),
]


@pytest.mark.parametrize(("verb", "n_tokens", "status", "code"), EDGES)
def test_c02_c06_limits(verb: str, n_tokens: int, status: int, code: str | None) -> None:
    async def main() -> None:
        async with serving() as server:
            n_before = 1 if verb == "generate" else 0
            session_id = await server.open(**({"token_ids": [1]} if n_before else {}))
            path = {"open": "/v1/sessions", "embed": "/v1/embed"}
            body: dict[str, Any] = {"token_ids": [1] * n_tokens, "points": []}
            if verb == "open":
                del body["points"]
            if verb == "generate":
                body = {"max_tokens": n_tokens, "ignore_eos": True, "points": []}
            where = path.get(verb, f"/v1/sessions/{session_id}/{verb}")
            answer = await server.post(where, **body)
            assert answer.status_code == status
            if code is not None:
                assert error_of(answer)["code"] == code
            if code == "context_length_exceeded":
                told = error_of(answer)
                assert "maximum context length is 1024 tokens" in told["message"]
                numbers = (told["n_ctx"], told["past_length"], told["n_new"])
                assert numbers == (1024, n_before, n_tokens)
            lengths = [s["past_length"] for s in await listed(server)]
            stepped = n_tokens if status < 400 else 0
            expected = {
                "open": [n_tokens, 0] if status == 201 else [0],
                "embed": [0],
            }.get(verb, [n_before + stepped])
            assert lengths == expected

    asyncio.run(main())


async def listed(server: Serving) -> list[dict[str, Any]]:
    return list((await server.client.get("/v1/sessions")).json()["data"])


@served
async def test_c14_the_limit_is_the_same_for_text_and_ids(server: Serving) -> None:
    text = " a" * 1025
    ids = (await server.post("/tokenize", prompt=text)).json()["tokens"]
    assert len(ids) == 1025
    session_id = await server.open()
    for path in ("/v1/sessions", f"/v1/sessions/{session_id}/append", "/v1/embed"):
        as_text = await server.post(path, prompt=text)
        as_ids = await server.post(path, token_ids=ids)
        assert as_text.status_code == as_ids.status_code == 400
        told = error_of(as_text)
        assert told == {**error_of(as_ids), "param": "prompt"}
        assert told["code"] == "context_length_exceeded"
        assert (told["n_ctx"], told["past_length"], told["n_new"]) == (1024, 0, 1025)
    assert [session["past_length"] for session in await listed(server)] == [0]


@served
async def test_c01_c04_c12_nothing_passes_the_context(server: Serving) -> None:
    session_id = await server.open(token_ids=[1] * 1000)
    path = f"/v1/sessions/{session_id}"
    refused = [
        await server.post(f"{path}/append", token_ids=[1] * 25),
        await server.post(f"{path}/generate", max_tokens=25),
        await server.post(f"{path}/generate", max_tokens=2147483648),
        await server.client.post(f"{path}/generate", json={"max_tokens": 25}, headers=SSE),  # S08
        await server.post(f"{path}/append", prompt="a" * 131_073),
    ]
    assert {error_of(answer)["code"] for answer in refused} == {"context_length_exceeded"}
    assert [error_of(answer)["param"] for answer in refused] == [
        "token_ids",
        "max_tokens",
        "max_tokens",
        "max_tokens",
        "prompt",
    ]
    assert await server.length(session_id) == 1000
    assert (await server.post(f"{path}/append", token_ids=[1] * 24)).status_code == 200
    assert await server.length(session_id) == 1024
    full = await server.post(f"{path}/generate")
    assert error_of(full)["code"] == "context_length_exceeded"
    assert error_of(full)["n_new"] == 1


@served
async def test_generate_takes_all_that_remains(server: Serving) -> None:
    session_id = await server.open(token_ids=[1] * 1020)
    body: dict[str, Any] = {"max_tokens": None, "ignore_eos": True, "points": []}
    told = (await server.post(f"/v1/sessions/{session_id}/generate", **body)).json()
    assert [r["position"] for r in told["records"]] == [1020, 1021, 1022, 1023]
    assert told["records"][-1]["finish_reason"] == "length"


@served
async def test_an_empty_session_cannot_generate(server: Serving) -> None:
    answer = await server.post(f"/v1/sessions/{await server.open()}/generate")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "empty_session")


@served
async def test_p11_truncate_edges(server: Serving) -> None:
    session_id = await server.open(token_ids=[1, 2, 3])
    path = f"/v1/sessions/{session_id}"
    for to in (-2, 4, 1.0, None):
        assert (await server.post(f"{path}/truncate", to=to)).status_code == 400
    assert error_of(await server.post(f"{path}/truncate", to=4))["past_length"] == 3
    assert await server.length(session_id) == 3
    assert (await server.post(f"{path}/truncate", to=0)).json()["past_length"] == 0
    record = (await server.post(f"{path}/append", token_ids=[9])).json()["records"][0]
    assert record["position"] == 0


@served
async def test_p16_x08_an_expected_length_that_differs_is_a_409(server: Serving) -> None:
    session_id = await server.open()
    path = f"/v1/sessions/{session_id}"
    body = {"token_ids": [5], "past_length": 0}
    assert (await server.post(f"{path}/append", **body)).status_code == 200
    for verb, again in (("append", body), ("generate", {"past_length": 0})):
        told = await server.post(f"{path}/{verb}", **again)
        assert told.status_code == 409
        assert error_of(told)["code"] == "past_length_mismatch"
        assert (error_of(told)["expected"], error_of(told)["past_length"]) == (0, 1)
    assert (await server.post(f"{path}/truncate", to=0, past_length=7)).status_code == 409
    assert await server.length(session_id) == 1


def test_an_answer_that_would_be_too_large_is_refused_before_compute() -> None:
    async def main() -> None:
        async with serving(max_response_bytes=100_000) as server:
            session_id = await server.open()
            path = f"/v1/sessions/{session_id}/append"
            body: dict[str, Any] = {"token_ids": [1] * 200, "points": ["resid_post.*"]}
            refused = await server.post(path, **body)
            assert (refused.status_code, error_of(refused)["code"]) == (400, "response_too_large")
            assert error_of(refused)["max_bytes"] == 100_000
            assert await server.length(session_id) == 0
            embedded = await server.post("/v1/embed", token_ids=[1] * 200)
            assert error_of(embedded)["code"] == "response_too_large"
            assert (await server.client.post(path, json=body, headers=NDJSON)).status_code == 200
            assert await server.length(session_id) == 200

    asyncio.run(main())

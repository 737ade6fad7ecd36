"""Requests that are wrong in themselves, on any route."""

import asyncio
from typing import Any

import pytest

from tests.server.serving import Serving, error_of, served, serving


@served
async def test_q14_n03_bodies_that_cannot_be_read(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open(token_ids=[1])}/generate"
    bodies = [
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"{",
        b"{'a': 1}",
        b"\xff\xfe",
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"a": ' * 500 + b"1" + b"}" * 500,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"max_tokens": 1, "\\ud83d": 1}',
    ]
    for body in bodies:
        answer = await server.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, body[:40]
        assert error_of(answer)["code"] == "invalid_request"
    assert (await server.post(path, max_tokens=1)).status_code == 200


@served
async def test_c08_an_empty_input_harms_nobody(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open()}/append"
    bodies: list[dict[str, Any]] = [{"prompt": ""}, {"token_ids": []}, {}]
    for body in bodies:
        for refusing in ("/v1/embed", path):
            answer = await server.post(refusing, **body)
            assert (answer.status_code, error_of(answer)["code"]) == (400, "empty_input")
            assert (await server.post(refusing, prompt="a")).status_code == 200


@served
async def test_a_body_of_too_many_values_is_refused_unparsed(server: Serving) -> None:
    headers = {"content-type": "application/json"}
    for body in (
        b'{"tokens": [' + b"1," * (7 * 2**20) + b"1]}",
        b"[" * 300_000,
        b'{"tokens": [' + b"{}," * 300_000 + b"1]}",
    ):
        answer = await server.client.post("/detokenize", content=body, headers=headers)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "invalid_request"
        assert "262144 values" in error_of(answer)["message"]
    most = await server.post("/detokenize", tokens=[15496] * 131_072)
    assert most.json() == {"prompt": "Hello" * 131_072}


@served
async def test_bodies_must_be_json(server: Serving) -> None:
    for media in ("text/plain", "application/x-www-form-urlencoded", "application/json;charset=x"):
        answer = await server.client.post(
            "/tokenize", content=b'{"prompt": "a"}', headers={"content-type": media}
        )
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    fine = await server.client.post(
        "/tokenize",
        content=b'{"prompt": "a"}',
        headers={"content-type": 'Application/JSON; charset="UTF-8"'},
    )
    assert fine.status_code == 200


@served
async def test_t12_the_last_of_repeated_keys_counts(server: Serving) -> None:
    answer = await server.client.post(
        "/detokenize",
        content=b'{"tokens": [1], "tokens": [15496]}',
        headers={"content-type": "application/json"},
    )
    assert answer.json() == {"prompt": "Hello"}


@served
async def test_what_is_not_built_is_refused(server: Serving) -> None:
    session_id = await server.open(token_ids=[1])
    answer = await server.client.post(
        f"/v1/sessions/{session_id}/append",
        json={"token_ids": [1]},
        headers={"Idempotency-Key": "k"},
    )
    assert answer.status_code == 400
    told = error_of(answer)
    assert (told["code"], told["param"]) == ("not_supported", "Idempotency-Key")
    assert await server.length(session_id) == 1


@served
async def test_points_and_positions_that_are_wrong(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open()}/append"
    unknown = await server.post(path, token_ids=[1], points=["resid_post.99"])
    assert error_of(unknown)["code"] == "unknown_point"
    for points_at in ("1", "0:2", "x"):
        answer = await server.post(path, token_ids=[1], points_at=points_at)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "points_at"


@served
async def test_unknown_query_names_are_refused_on_every_route(server: Serving) -> None:
    for path, verbs in server.app.openapi()["paths"].items():
        for verb in verbs:
            body: dict[str, Any] | None = None if verb in ("get", "delete") else {}
            url = path.replace("{session_id}", "x").replace("{model_id}", "x")
            answer = await server.client.request(verb, f"{url}?x_y=1", json=body)
            assert answer.status_code == 400, (verb, path)
            assert error_of(answer)["param"] == "x_y", (verb, path)


@served
async def test_unknown_paths_and_methods(server: Serving) -> None:
    unknown = await server.client.get("/v1/nothing")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "not_found")
    method = await server.client.put("/v1/sessions", json={})
    assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"]
    assert "x-request-id" in method.headers


@pytest.mark.parametrize("name", ["../x", "..%2fx", "a%5cb", "%2fetc%2fx", "a%00b", "x" * 5000])
def test_q01_names_reach_no_file(name: str) -> None:
    async def main() -> None:
        async with serving() as server:
            for path in (f"/v1/sessions/{name}", f"/v1/sessions/{name}/tokens"):
                assert 400 <= (await server.client.get(path)).status_code < 500

    asyncio.run(main())


@served
async def test_q10_no_origin_is_let_in(server: Serving) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for verb in ("OPTIONS", "POST", "GET"):
        answer = await server.client.request(verb, "/v1/sessions", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]


@served
async def test_a_body_where_none_is_taken_is_refused(server: Serving) -> None:
    session_id = await server.open(token_ids=[1])
    for method, path in (
        ("DELETE", f"/v1/sessions/{session_id}"),
        ("GET", f"/v1/sessions/{session_id}"),
        ("GET", "/health"),
    ):
        answer = await server.client.request(method, path, json={"past_length": 99})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request")
    assert await server.length(session_id) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=UTF-8; foo=bar"}, 200),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({}, 415),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
def test_only_plain_json_is_read(headers: dict[str, str], status: int) -> None:
    async def main() -> None:
        async with serving() as server:
            answer = await server.client.post(
                "/tokenize", content=b'{"prompt": "a"}', headers=headers
            )
            assert answer.status_code == status
            if status != 200:
                assert error_of(answer)["code"] == "unsupported_media_type"

    asyncio.run(main())


@served
async def test_a_query_is_as_strict_as_a_body(server: Serving) -> None:
    assert (await server.client.get("/v1/sessions?limit=5")).status_code == 200
    for query in ("limit=1.0", "limit=5_0", "limit=%205", "limit=1&limit=2", "limit=0", "limit="):
        answer = await server.client.get(f"/v1/sessions?{query}")
        assert (answer.status_code, error_of(answer)["param"]) == (400, "limit"), query


@served
async def test_a_wrong_method_is_told_all_the_right_ones(server: Serving) -> None:
    for path, allowed in (("/v1/sessions", "GET, POST"), ("/v1/sessions/x", "DELETE, GET")):
        answer = await server.client.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert error_of(answer)["code"] == "method_not_allowed"

"""Sessions over HTTP, with the real engine: open, list, step, roll back, close; positions."""

import json
from typing import Any

from server import answers
from tests.server.hand import sse
from tests.server.serving import Serving, error_of, served, vector


@served
async def test_a_session_from_open_to_delete(server: Serving) -> None:
    opened = await server.post("/v1/sessions", metadata={"who": "me"}, ttl_seconds=60)
    session = answers.SessionState.model_validate(opened.json(), strict=True)
    assert opened.status_code == 201
    assert set(opened.json()) == set(answers.SessionState.model_fields)
    assert (session.past_length, session.remaining, session.n_ctx) == (0, 1024, 1024)
    assert session.expires - session.created in (60, 61)
    assert session.metadata == {"who": "me"}
    path = f"/v1/sessions/{session.id}"

    stepped = (await server.post(f"{path}/append", prompt="Hello world")).json()
    answers.Steps.model_validate(stepped, strict=True)
    assert set(stepped) == {"object", "session", "records", "usage"}
    assert [r["token"]["id"] for r in stepped["records"]] == [15496, 995]
    assert [r["position"] for r in stepped["records"]] == [0, 1]
    assert stepped["session"]["past_length"] == 2

    generated = (await server.post(f"{path}/generate", max_tokens=3)).json()
    answers.Steps.model_validate(generated, strict=True)
    assert [r["position"] for r in generated["records"]] == [2, 3, 4]
    assert generated["records"][-1]["finish_reason"] == "length"
    assert isinstance(generated["usage"]["seed"], int)

    tokens = (await server.client.get(f"{path}/tokens")).json()
    answers.TokenList.model_validate(tokens, strict=True)
    ids = [r["token"]["id"] for r in stepped["records"] + generated["records"]]
    assert [token["id"] for token in tokens["data"]] == ids

    truncated = (await server.post(f"{path}/truncate", to=2, past_length=5)).json()
    assert truncated["past_length"] == 2
    assert (await server.client.get(path)).json()["past_length"] == 2

    deleted = await server.client.delete(path)
    assert deleted.json() == {"id": session.id, "object": "session.deleted", "deleted": True}
    gone = [
        await server.client.get(path),
        await server.client.get(f"{path}/tokens"),
        await server.client.delete(path),
        await server.post(f"{path}/append", prompt="a"),
        await server.post(f"{path}/generate"),
        await server.post(f"{path}/truncate", to=0),
    ]
    assert {answer.status_code for answer in gone} == {404}
    assert {error_of(answer)["code"] for answer in gone} == {"session_not_found"}


@served
async def test_open_with_a_first_append(server: Serving) -> None:
    answer = await server.post("/v1/sessions", prompt="Hello world", prepend_bos=True)
    path = f"/v1/sessions/{answer.json()['id']}/tokens"
    tokens = (await server.client.get(path)).json()["data"]
    assert [token["id"] for token in tokens] == [50256, 15496, 995]


@served
async def test_a_refused_open_leaves_no_session(server: Serving) -> None:
    bodies: list[dict[str, Any]] = [
        {"token_ids": [1] * 1025},
        {"token_ids": [-1]},
        {"prompt": ""},
        {"prompt": 5},
    ]
    for body in bodies:
        assert (await server.post("/v1/sessions", **body)).status_code == 400
    listed = (await server.client.get("/v1/sessions")).json()
    assert listed["data"] == []
    assert listed["first_id"] is None


@served
async def test_listing_pages_newest_first(server: Serving) -> None:
    ids = [await server.open() for _ in range(5)][::-1]
    first = (await server.client.get("/v1/sessions?limit=3")).json()
    answers.SessionList.model_validate(first, strict=True)
    assert [s["id"] for s in first["data"]] == ids[:3]
    assert (first["has_more"], first["last_id"]) == (True, ids[2])
    rest = (await server.client.get(f"/v1/sessions?limit=3&after={ids[2]}")).json()
    assert [s["id"] for s in rest["data"]] == ids[3:]
    assert rest["has_more"] is False


@served
async def test_listing_refuses(server: Serving) -> None:
    for query in ("limit=0", "limit=101", "limit=x", "limit=", "offset=1"):
        answer = await server.client.get(f"/v1/sessions?{query}")
        assert answer.status_code == 400, query
        assert error_of(answer)["param"] == query.partition("=")[0]
    unknown = await server.client.get("/v1/sessions?after=sess_x")
    assert error_of(unknown)["code"] == "session_not_found"


@served
async def test_p01_one_token_uses_its_own_position(server: Serving) -> None:
    tables = server.service.engine.model.tables
    path = f"/v1/sessions/{await server.open()}/append"
    await server.post(path, token_ids=[15496])
    record = (await server.post(path, token_ids=[995])).json()["records"][0]
    at_1, at_0 = ((tables.wte[995] + tables.wpe[p]).numpy().tobytes() for p in (1, 0))
    assert vector(record, "embedding").tobytes() == at_1
    assert at_1 != at_0


@served
async def test_embed_is_the_two_rows_added(server: Serving) -> None:
    tables = server.service.engine.model.tables
    points = ["wte", "wpe", "embedding", "resid_pre.0"]
    answer = await server.post("/v1/embed", token_ids=[7, 7], past_length=1022, points=points)
    told = answer.json()
    assert set(told) == {"object", "records"}
    for t, record in enumerate(told["records"]):
        assert record["position"] == 1022 + t
        assert vector(record, "wte").tobytes() == tables.wte[7].numpy().tobytes()
        assert vector(record, "wpe").tobytes() == tables.wpe[1022 + t].numpy().tobytes()
        added = (tables.wte[7] + tables.wpe[1022 + t]).numpy().tobytes()
        assert vector(record, "embedding").tobytes() == added
        assert vector(record, "resid_pre.0").tobytes() == added


@served
async def test_embed_streams(server: Serving) -> None:
    body = {"token_ids": [47249, 222] * 80, "stream": True, "points": ["hook_embed"]}
    *records, done, marker = sse((await server.post("/v1/embed", **body)).content)
    texts = [json.loads(record)["text"] for record in records]
    assert texts == ["", "😀"] * 80
    assert json.loads(done)["object"] == "done"
    assert json.loads(done)["session"] is None
    assert json.loads(done)["aliases"] == {"hook_embed": "wte"}
    assert marker == "[DONE]"
    plain = (await server.post("/v1/embed", **{**body, "stream": False})).json()
    assert [r["points"] for r in plain["records"]] == [json.loads(r)["points"] for r in records]


@served
async def test_embed_refuses(server: Serving) -> None:
    over = await server.post("/v1/embed", token_ids=[1, 2], past_length=1023)
    assert error_of(over)["code"] == "context_length_exceeded"
    assert error_of(over)["param"] == "token_ids"
    block = await server.post("/v1/embed", token_ids=[1], points=["resid_post.0"])
    assert error_of(block)["code"] == "unknown_point"
    both = await server.post("/v1/embed", token_ids=[1], prompt="a")
    assert error_of(both)["code"] == "empty_input"

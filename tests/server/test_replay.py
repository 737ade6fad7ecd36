"""Forks that step a session's tail again, edited or not, and tell of it."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from tests.agreement import assert_agrees
from tests.server.editing import (
    refused,
    scaled,
    state,
    steps,
    tensor,
)
from tests.server.forking import PROMPT, assert_no_session_is_left, ids
from tests.server.serving import Serving, error_of, served, serving, vector

pytestmark = pytest.mark.usefixtures("lively")


@served
async def test_a_fork_replays_with_the_edits_kept_or_dropped(server: Serving) -> None:
    plain = await server.open(token_ids=PROMPT[:8])
    edited = await server.open(token_ids=PROMPT[:4])
    add = {"point": "resid_post.0", "op": "add", "value": {"param": "wte[7]"}, "scale": 3}
    shown = ["logits"]
    made = await steps(server, edited, token_ids=PROMPT[4:8], interventions=[add], points=shown)
    again: dict[str, Any] = {"at": 3, "replay": True, "points": shown}
    kept = await steps(server, edited, "fork", **again)
    dropped = await steps(server, edited, "fork", **again, edits="drop")
    alone = await steps(server, plain, "fork", **again)
    assert [len(record["edited"]) for record in kept] == [0, 1, 1, 1, 1]
    assert [len(record["edited"]) for record in dropped] == [0] * 5
    assert [record["position"] for record in kept] == [3, 4, 5, 6, 7]
    for a, b in zip(made, kept[1:], strict=True):
        assert_agrees(vector(a, "logits"), vector(b, "logits"))
    for a, b in zip(dropped, alone, strict=True):
        assert_agrees(vector(a, "logits"), vector(b, "logits"))
    assert np.abs(vector(kept[-1], "logits") - vector(dropped[-1], "logits")).max() > 0.1


@served
async def test_a_fork_edits_what_is_committed(server: Serving) -> None:
    parent = await server.open(token_ids=PROMPT[:8])
    answer = await server.post(
        f"/v1/sessions/{parent}/fork",
        at=5,
        replay=True,
        token_ids=[9],
        interventions=scaled("6"),
        points=["z.0"],
        points_at="6",
        logprobs=True,
        metadata={"a": "b"},
    )
    assert answer.status_code == 201
    told = answer.json()
    assert told["object"] == "steps"
    child = told["session"]
    assert child["parent"] == {"id": parent, "past_length": 5}
    assert (child["past_length"], child["edits"], child["metadata"]) == (9, 1, {"a": "b"})
    records = told["records"]
    assert [record["token"]["id"] for record in records] == [*PROMPT[5:8], 9]
    assert [bool(record["edited"]) for record in records] == [False, True, False, False]
    assert [bool(record["points"]) for record in records] == [False, True, False, False]
    assert not tensor(records[1], "z.0").any()
    assert all(record["logprob"] < 0 for record in records)
    assert (told["usage"]["steps"], await state(server, child["id"])) == (4, child)
    assert (await state(server, parent))["edits"] == 0
    beyond = await refused(server, parent, "fork", at=5, replay=True, interventions=scaled("4"))
    assert beyond["code"] == "position_committed"
    hidden = [{"point": "scores.0", "op": "mask", "keys": ":3"}]
    told = await refused(server, parent, "fork", at=2, replay=True, interventions=hidden)
    assert "leaves the step at 2 no key" in told["message"]
    assert len(await steps(server, parent, "fork", at=3, replay=True, interventions=hidden)) == 5


@pytest.mark.parametrize("media", ["text/event-stream", "application/x-ndjson"])
def test_a_fork_streams_its_records_once_all_are_made(media: str) -> None:
    async def main() -> None:
        async with serving() as server:
            parent = await server.open(token_ids=PROMPT[:8])
            body = {"at": 5, "replay": True, "points": ["z.0"]}
            whole = await server.post(f"/v1/sessions/{parent}/fork", **body)
            stream = await server.client.post(
                f"/v1/sessions/{parent}/fork", json=body, headers={"accept": media}
            )
            assert (stream.status_code, stream.headers["content-type"].split(";")[0]) == (
                201,
                media,
            )
            lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
            *records, last = [json.loads(line) for line in lines if line != "[DONE]"]
            assert records == whole.json()["records"]
            assert last["object"] == "done"
            assert last["session"]["id"] in await ids(server)
            plain = await server.client.post(
                f"/v1/sessions/{parent}/fork", json={}, headers={"accept": media}
            )
            assert plain.json()["object"] == "session"

    asyncio.run(main())


def test_a_stream_of_a_fork_is_bounded_like_an_answer() -> None:
    """Its records are held until all are made."""

    async def main() -> None:
        async with serving(max_response_bytes=100_000) as server:
            parent = await server.open(token_ids=PROMPT)
            body = {"at": 0, "replay": True, "points": ["resid_post.*", "logits"], "stream": True}
            answer = await server.post(f"/v1/sessions/{parent}/fork", **body)
            assert (answer.status_code, error_of(answer)["code"]) == (400, "response_too_large")
            assert await ids(server) == [parent]
            assert server.service.answers.held_bytes == 0

    asyncio.run(main())


def test_s02_a_replay_whose_client_leaves_is_no_session() -> None:
    body = {"at": 0, "replay": True, "interventions": scaled("3:")}
    asyncio.run(assert_no_session_is_left(**body))

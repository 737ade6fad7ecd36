"""What tests of forks share. Weights are lively; the reference is a server that shares nothing."""

from typing import Any

import numpy as np

from model.config import GPT2Config
from tests.agreement import assert_agrees
from tests.lively import lively_checkpoint
from tests.server.gating import begin, gated, until_idle
from tests.server.hand import http_scope, until
from tests.server.serving import Serving, serving, vector

LIVELY = lively_checkpoint(GPT2Config(n_ctx=256, n_embd=32, n_layer=2, n_head=2))
PROMPT = [(7919 * n) % 50257 for n in range(100)]  # three pieces and a part of one


async def fork(server: Serving, session_id: str, **body: Any) -> str:
    answer = await server.post(f"/v1/sessions/{session_id}/fork", **body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def tokens_of(server: Serving, session_id: str) -> list[int]:
    told = (await server.client.get(f"/v1/sessions/{session_id}/tokens")).json()["data"]
    return [int(token["id"]) for token in told]


async def ids(server: Serving) -> list[str]:
    told = (await server.client.get("/v1/sessions")).json()["data"]
    return [str(session["id"]) for session in told]


async def continued(server: Serving, session_id: str) -> tuple[list[int], list[Any]]:
    """Greedy ids and their logits."""
    body = {"max_tokens": 12, "temperature": 0, "points": ["logits"], "ignore_eos": True}
    answer = await server.post(f"/v1/sessions/{session_id}/generate", **body)
    assert answer.status_code == 200, answer.text
    records = answer.json()["records"]
    return [r["token"]["id"] for r in records], [vector(r, "logits") for r in records]


async def assert_as_alone(server: Serving, session_id: str) -> None:
    """See that it goes on as a session of its own that knows the same tokens."""
    token_ids = await tokens_of(server, session_id)
    theirs, logits = await continued(server, session_id)
    async with serving() as other:
        alone = await continued(other, await other.open(token_ids=token_ids))
    assert theirs == alone[0]
    assert len(set(theirs)) > 3, "these weights would hide a wrong position"
    assert_agrees(np.array(logits), np.array(alone[1]))


async def assert_no_session_is_left(**body: Any) -> None:
    """See that a fork whose client leaves while it is stepped has taken nothing."""
    async with gated() as (server, model):
        parent = await server.open(token_ids=PROMPT)
        before = await kv(server)
        model.close()
        headers = {"content-type": "application/json"}
        scope = http_scope("POST", f"/v1/sessions/{parent}/fork", headers=headers)
        hand, request = begin(server, scope, **body)
        await until(lambda: server.service.engine.stats().running > 0)
        hand.disconnect()
        await request
        model.open()
        await until_idle(server)
        assert await ids(server) == [parent]
        assert (await kv(server))["bytes_used"] == before["bytes_used"]
        assert server.service.answers.held_bytes == 0


async def kv(server: Serving) -> dict[str, int]:
    return dict((await server.client.get("/v1/capabilities")).json()["kv"])

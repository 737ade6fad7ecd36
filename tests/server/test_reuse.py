"""Reuse of K/V over HTTP: what was computed before is found, said, and as good as computed."""

import asyncio
from typing import Any

import pytest

from tests.agreement import assert_agrees
from tests.server.serving import Serving, served, serving, vector

PROMPT = [(7919 * n) % 50257 for n in range(100)]  # three pieces of 32 and a part of one


async def append(server: Serving, session_id: str, **body: Any) -> dict[str, Any]:
    answer = await server.post(f"/v1/sessions/{session_id}/append", **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def counted(server: Serving, name: str) -> float:
    text = (await server.client.get("/metrics")).text
    found = [line for line in text.splitlines() if line.startswith(f"stepscope:{name} ")]
    assert len(found) == 1, name
    return float(found[0].split()[1])


@served
async def test_a_prompt_that_was_stepped_before_is_found(server: Serving) -> None:
    first = await append(server, await server.open(), token_ids=PROMPT)
    assert first["usage"]["cached_tokens"] == 0
    again = await append(server, await server.open(), token_ids=[*PROMPT, 1])
    assert again["usage"]["cached_tokens"] == 96, "whole pieces"
    assert (again["usage"]["steps"], len(again["records"])) == (101, 101)
    for record, before in zip(again["records"], first["records"], strict=False):
        assert record["points"] == before["points"]
    other = await append(server, await server.open(), token_ids=[7, *PROMPT])
    assert other["usage"]["cached_tokens"] == 0, "the same ids at other positions"
    assert await counted(server, "prefix_cache_hits_total") == 96
    assert await counted(server, "prompt_tokens_total") == 302


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        ({"points": ["wte", "wpe", "embedding"]}, 96),
        ({"points": []}, 96),
        ({"points": ["resid_post.1"]}, 0),
        ({"points": ["logits"], "points_at": "70"}, 64),
        ({"points": ["ln_f"], "points_at": "98:100"}, 96),
        ({"points": [], "logprobs": True}, 0),
    ],
)
def test_what_has_to_be_computed_is(asked: dict[str, Any], cached: int) -> None:
    async def main() -> None:
        async with serving() as server:
            first = await append(server, await server.open(), token_ids=PROMPT, **asked)
            again = await append(server, await server.open(), token_ids=PROMPT, **asked)
            assert again["usage"]["cached_tokens"] == cached
            for record, before in zip(again["records"], first["records"], strict=True):
                assert record["points"].keys() == before["points"].keys()
                for point in record["points"]:
                    assert_agrees(vector(record, point), vector(before, point), fresh=True)
                if "logprobs" in asked and before["position"] > 0:
                    assert record["logprob"] == pytest.approx(before["logprob"], abs=1e-4)

    asyncio.run(main())


@served
async def test_a_deleted_session_leaves_its_pieces_for_reuse(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT)
    assert (await kv(server))["bytes_cached"] == 0
    await server.client.delete(f"/v1/sessions/{session_id}")
    told = await kv(server)
    assert (told["bytes_used"], told["bytes_shared"]) == (0, 0)
    assert told["bytes_cached"] == 96 * 640
    again = await append(server, await server.open(), token_ids=PROMPT)
    assert again["usage"]["cached_tokens"] == 96
    assert (await kv(server))["bytes_cached"] == 0


async def kv(server: Serving) -> dict[str, int]:
    return dict((await server.client.get("/v1/capabilities")).json()["kv"])


def test_cached_pieces_give_way_to_sessions() -> None:
    async def main() -> None:
        async with serving(kv_budget="660KiB") as server:
            for n in range(8):
                session_id = await server.open(token_ids=[n] * 256)
                await server.client.delete(f"/v1/sessions/{session_id}")
            told = await kv(server)
            assert told["bytes_used"] == 0
            assert 0 < told["bytes_cached"] <= told["bytes_total"]
            await append(server, await server.open(), token_ids=PROMPT * 10, points=[])
            told = await kv(server)
            assert told["bytes_used"] + told["bytes_cached"] <= told["bytes_total"]
            text = (await server.client.get("/metrics")).text
            lines = [line for line in text.splitlines() if 'kv_evictions_total{reason="p' in line]
            dropped = {line.split('"')[1]: float(line.split()[1]) for line in lines}
            assert dropped["preempted"] == 0
            assert dropped["prefix"] > 32

    asyncio.run(main())

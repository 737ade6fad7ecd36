"""Precision modes over HTTP: what is told of them, that each serves, and that exact is exact."""

import asyncio
from typing import Any

import pytest

from tests.server.forking import PROMPT, fork
from tests.server.serving import Serving, serving

pytestmark = pytest.mark.usefixtures("lively")

ROW = 2 * 2 * 32  # numbers of K and V of one token: layers, keys and values, width


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, ("float32", "float32", False, 4 * ROW)),
        ({"kv_dtype": "bfloat16"}, ("float32", "bfloat16", False, 2 * ROW)),
        ({"dtype": "bfloat16"}, ("bfloat16", "bfloat16", False, 2 * ROW)),
        ({"dtype": "bfloat16", "kv_dtype": "float32"}, ("bfloat16", "float32", False, 4 * ROW)),
        ({"dtype": "int8"}, ("int8", "float32", False, 4 * ROW)),
        ({"dtype": "int8", "kv_dtype": "bfloat16"}, ("int8", "bfloat16", False, 2 * ROW)),
        ({"batch_invariant": True}, ("float32", "float32", True, 4 * ROW)),
    ],
)
def test_every_mode_serves_and_says_what_it_is(
    flags: dict[str, Any], told: tuple[str, str, bool, int]
) -> None:
    async def main() -> None:
        async with serving(**flags) as server:
            known = (await server.client.get("/v1/capabilities")).json()
            facts = tuple(known[name] for name in ("dtype", "kv_dtype", "batch_invariant"))
            assert (*facts, known["kv"]["bytes_per_token"]) == told
            parent = await server.open(token_ids=PROMPT)
            child = await fork(server, parent, at=70, token_ids=[1])
            for session_id, length in ((parent, 100), (child, 71)):
                body = {"max_tokens": 3, "temperature": 0, "points": ["resid_post.1", "logits"]}
                path = f"/v1/sessions/{session_id}/generate"
                records = (await server.post(path, **body)).json()["records"]
                assert [r["position"] for r in records] == list(range(length, length + 3))
                kinds = {t["dtype"] for r in records for t in r["points"].values()}
                assert kinds == {"float32"}

    asyncio.run(main())


async def bits(server: Serving, session_id: str) -> list[tuple[str, str]]:
    """What eight greedy steps report, as it was sent."""
    body = {"max_tokens": 8, "temperature": 0, "points": ["resid_post.0", "logits"]}
    told = await server.post(f"/v1/sessions/{session_id}/generate", ignore_eos=True, **body)
    assert told.status_code == 200
    return [
        (r["points"]["resid_post.0"]["data"], r["points"]["logits"]["data"])
        for r in told.json()["records"]
    ]


async def stepped(server: Serving, session_id: str, token_ids: list[int], chunk: int) -> None:
    """Append in chunks, all of them computed: `ln_f` is asked for."""
    for at in range(0, len(token_ids), chunk):
        part = token_ids[at : at + chunk]
        path = f"/v1/sessions/{session_id}/append"
        answer = await server.post(path, token_ids=part, points=["ln_f"])
        assert answer.status_code == 200
        assert answer.json()["usage"]["cached_tokens"] == 0


def test_b01_exact_bits_whatever_the_mates_the_chunks_and_the_forks() -> None:
    async def main() -> None:
        async with serving(batch_invariant=True) as server:
            alone = await server.open()
            await stepped(server, alone, PROMPT, 100)
            expected = await bits(server, alone)

            async def others(n: int) -> None:
                mate = await server.open(token_ids=[n] * (10 * n + 1))
                body = {"max_tokens": 120, "ignore_eos": True, "points": [], "seed": n}
                answer = await server.post(f"/v1/sessions/{mate}/generate", **body)
                assert answer.status_code == 200

            async def again(chunk: int) -> None:
                session_id = await server.open()
                await stepped(server, session_id, PROMPT, chunk)
                assert await bits(server, session_id) == expected, chunk

            async def branched(at: int) -> None:
                other = await server.open(token_ids=[*PROMPT[:at], 9, 9, 9])
                child = await fork(server, other, at=at)
                await stepped(server, child, PROMPT[at:], 13)
                assert await bits(server, child) == expected, at

            await asyncio.gather(
                *(others(n) for n in range(7)),
                *(again(chunk) for chunk in (1, 7, 64)),
                *(branched(at) for at in (33, 90)),
            )

    asyncio.run(main())

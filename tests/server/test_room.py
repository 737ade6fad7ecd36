"""More work than the K/V budget has room for, over HTTP: defined answers at once, nothing hangs."""

import asyncio
from typing import Any

import httpx

from tests.server.gating import gated, meanwhile, until_busy
from tests.server.serving import Serving, error_of, serving

BUDGET = "1300KiB"  # two full sessions
N_SESSIONS = 6
PATIENCE = 60.0


async def fill(server: Serving) -> list[str]:
    """Sessions whose rows fill the budget almost."""
    ids = [await server.open() for _ in range(N_SESSIONS)]
    for n, session_id in enumerate(ids):
        path = f"/v1/sessions/{session_id}/append"
        body: dict[str, Any] = {"token_ids": [n, *range(300)], "points": []}
        assert (await server.post(path, **body)).status_code == 200
    return ids


def check_refused(answer: httpx.Response) -> None:
    assert answer.status_code in (429, 503)
    assert answer.headers["retry-after"]
    assert error_of(answer)["code"] in ("queue_full", "too_many_sessions", "no_room")


async def check_works(server: Serving, session_id: str, length: int) -> None:
    """See that the session is where it was left, and steps."""
    path = f"/v1/sessions/{session_id}/append"
    answer = await server.post(path, token_ids=[7], past_length=length, points=[])
    assert answer.status_code == 200, answer.text
    assert answer.json()["records"][0]["position"] == length


def test_m01_every_session_steps_at_once_in_a_full_pool() -> None:
    async def main() -> None:
        settings: dict[str, Any] = {
            "kv_budget": BUDGET,
            "max_sessions": N_SESSIONS,
            "max_queue": N_SESSIONS,
        }
        async with serving(**settings) as server, asyncio.timeout(PATIENCE):
            ids = await fill(server)
            check_refused(await server.post("/v1/sessions"))
            check_refused(await server.post(f"/v1/sessions/{ids[0]}/fork"))
            body = {"max_tokens": 400, "ignore_eos": True, "points": []}
            answers = await asyncio.gather(
                *(server.post(f"/v1/sessions/{session_id}/generate", **body) for session_id in ids)
            )
            n_stepped = 0
            for session_id, answer in zip(ids, answers, strict=True):
                if answer.status_code == 200:
                    n_stepped += 1
                    await check_works(server, session_id, 701)
                else:
                    check_refused(answer)
                    await check_works(server, session_id, 301)
            assert n_stepped >= 2, "as many as there is room for"
            assert server.service.engine.stats().evictions["preempted"], "all of them grew"
            told = (await server.client.get("/v1/capabilities")).json()["kv"]
            assert told["bytes_used"] + told["bytes_cached"] <= told["bytes_total"]

    asyncio.run(main())


def test_m01_streams_in_a_full_pool_end_with_their_last_record() -> None:
    async def main() -> None:
        async with serving(kv_budget=BUDGET) as server, asyncio.timeout(PATIENCE):
            ids = await fill(server)
            body = {"max_tokens": 300, "ignore_eos": True, "points": [], "temperature": 0}
            answers = await asyncio.gather(
                *(
                    server.post(f"/v1/sessions/{session_id}/generate", stream=True, **body)
                    for session_id in ids
                )
            )
            for session_id, answer in zip(ids, answers, strict=True):
                if answer.status_code == 200:
                    assert answer.text.endswith("data: [DONE]\n\n")
                    assert answer.text.count('"object":"step"') == 300, "no step is told twice"
                else:
                    check_refused(answer)
                length = 601 if answer.status_code == 200 else 301
                await check_works(server, session_id, length)

    asyncio.run(main())


def test_m01_a_fork_without_room_is_refused_and_no_session() -> None:
    """The only full session that fits is being stepped."""

    async def main() -> None:
        settings: dict[str, Any] = {"kv_budget": "660KiB", "prefill_chunk": 16}
        async with gated(**settings) as (server, model), asyncio.timeout(PATIENCE):
            parent, working = await server.open(token_ids=[1] * 64), await server.open()
            model.close()
            body: dict[str, Any] = {"token_ids": [2] * 1000, "points": []}
            running = asyncio.create_task(server.post(f"/v1/sessions/{working}/append", **body))
            await until_busy(server, working)
            model.allow()
            forking = asyncio.create_task(
                server.post(f"/v1/sessions/{parent}/fork", token_ids=[3] * 500)
            )
            answer = await meanwhile(model, forking)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "no_room")
            assert answer.headers["retry-after"]
            assert not running.done()
            model.open()
            assert (await running).status_code == 200
            listed = (await server.client.get("/v1/sessions")).json()["data"]
            assert [session["id"] for session in listed] == [working, parent]
            await check_works(server, parent, 64)
            again = await server.post(f"/v1/sessions/{parent}/fork", token_ids=[3] * 500)
            assert (again.status_code, again.json()["past_length"]) == (201, 565)

    asyncio.run(main())


def test_m01_a_prompt_that_takes_the_whole_pool_is_served_alone() -> None:
    async def main() -> None:
        async with serving(kv_budget="660KiB") as server, asyncio.timeout(PATIENCE):
            ids = [await server.open(token_ids=[n] * 300) for n in range(3)]
            whole = await server.open()
            body: dict[str, Any] = {"token_ids": [9] * 1024, "points": []}
            answer = await server.post(f"/v1/sessions/{whole}/append", **body)
            assert answer.status_code == 200
            for session_id in ids:
                state = (await server.client.get(f"/v1/sessions/{session_id}")).json()
                assert (state["kv"], state["past_length"]) == ("evicted", 300)
                path = f"/v1/sessions/{session_id}/append"
                told = (await server.post(path, token_ids=[7], points=[])).json()
                assert told["records"][0]["position"] == 300
                assert told["usage"]["rebuilt_tokens"] == 300

    asyncio.run(main())

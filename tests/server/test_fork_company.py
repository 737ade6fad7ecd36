"""Forks while their parent is at work, deleted, or about to expire."""

import asyncio
import json

import pytest

from tests.server.forking import PROMPT, assert_as_alone, fork, ids, tokens_of
from tests.server.gating import begin, gated, meanwhile, steps_scope, until_busy
from tests.server.hand import Hand, http_scope, sse
from tests.server.serving import serving

pytestmark = pytest.mark.usefixtures("lively")


def test_x02_a_fork_of_a_running_stream_has_a_length_that_existed() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            parent = await server.open(token_ids=PROMPT)
            model.close()
            scope = steps_scope(parent, "generate", accept="application/x-ndjson")
            hand, request = begin(server, scope, max_tokens=100, temperature=0, ignore_eos=True)
            forks, told = [], []
            for index in range(8):
                forks.append(asyncio.create_task(fork(server, parent)))
                model.allow()
                await hand.until_body_has(f'"index":{index}'.encode())
                told.append(await server.length(parent))
            assert not request.done(), "a fork waits for no mutation"
            children = [await meanwhile(model, forking) for forking in forks]
            assert not request.done(), "a fork waits for no mutation"
            model.open()
            await request
            whole = await tokens_of(server, parent)
            assert len(whole) == 200
            lengths = []
            for child in children:
                state = (await server.client.get(f"/v1/sessions/{child}")).json()
                lengths.append(state["past_length"])
                assert state["parent"] == {"id": parent, "past_length": lengths[-1]}
                assert await tokens_of(server, child) == whole[: lengths[-1]]
            assert set(lengths) <= {100, *told}
            assert lengths == sorted(lengths)
            assert lengths[-1] > 100
            await assert_as_alone(server, children[-1])

    asyncio.run(main())


def test_x02_a_plain_answer_that_runs_is_not_seen_by_a_fork_until_it_commits() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            parent = await server.open(token_ids=PROMPT)
            model.close()
            running = asyncio.create_task(
                server.post(f"/v1/sessions/{parent}/generate", max_tokens=100, ignore_eos=True)
            )
            await until_busy(server, parent)
            model.allow(4)
            editing = asyncio.create_task(fork(server, parent, at=60, token_ids=[1, 2]))
            plain = asyncio.create_task(fork(server, parent, past_length=100))
            children = [await meanwhile(model, forking) for forking in (editing, plain)]
            assert not running.done()
            model.open()
            assert (await running).status_code == 200
            assert [await server.length(child) for child in children] == [62, 100]
            for child in children:
                await assert_as_alone(server, child)
            assert await server.length(parent) == 200

    asyncio.run(main())


def test_x02_deleting_a_parent_whose_stream_runs_leaves_its_forks() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            parent = await server.open(token_ids=PROMPT)
            model.close()
            scope = steps_scope(parent, "generate", accept="text/event-stream")
            hand, request = begin(server, scope, max_tokens=100, ignore_eos=True)
            model.allow()
            await hand.until_body_has(b'"index":0')
            child = await meanwhile(model, asyncio.create_task(fork(server, parent)))
            deleting = asyncio.create_task(server.client.delete(f"/v1/sessions/{parent}"))
            await asyncio.sleep(0)
            model.open()
            assert (await deleting).status_code == 200
            await request
            assert json.loads(sse(hand.body)[-1])["error"]["code"] == "session_deleted"
            await assert_as_alone(server, child)

    asyncio.run(main())


def test_x04_a_fork_touches_its_parent_until_its_last_byte() -> None:
    async def main() -> None:
        now = 1_000_000.0
        async with serving(clock=lambda: now) as server:
            parent = await server.open(token_ids=PROMPT, ttl_seconds=10)
            hand = Hand(write_blocks=True)
            hand.feed(b'{"ttl_seconds": 10}')
            headers = {"content-type": "application/json"}
            scope = http_scope("POST", f"/v1/sessions/{parent}/fork", headers=headers)
            request = asyncio.create_task(hand.run(server.app, scope))
            await asyncio.wait([request], timeout=0.2)
            now += 100
            server.service.engine.sweep()
            hand.may_write.set()
            await request
            assert hand.status == 201
            now += 9
            assert await ids(server) == [hand.json["id"], parent]
            now += 2
            assert await ids(server) == []

    asyncio.run(main())

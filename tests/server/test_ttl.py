"""Times to live over HTTP, by a clock that is told."""

import asyncio

import pytest

from tests.server.gating import begin, gated, steps_scope, until_busy, until_idle
from tests.server.hand import Hand, http_scope, sse
from tests.server.serving import serving


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_session_expires_then_is_forgotten() -> None:
    async def main() -> None:
        clock = Clock()
        async with serving(clock=clock) as server:
            path = f"/v1/sessions/{await server.open(ttl_seconds=10)}"
            clock.now += 9
            assert (await server.client.get(path)).json()["expires"] == clock.now + 10
            clock.now += 11
            for answer in (await server.client.get(path), await server.post(f"{path}/generate")):
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    410,
                    "session_expired",
                )
            clock.now += 10
            assert (await server.client.get(path)).status_code == 404

    asyncio.run(main())


def test_x04_a_stream_outlives_the_time_to_live_which_counts_from_its_end() -> None:
    async def main() -> None:
        clock = Clock()
        async with gated(clock=clock) as (server, model):
            session_id = await server.open(token_ids=[1], ttl_seconds=1)
            model.close()
            scope = steps_scope(session_id, "generate", accept="text/event-stream")
            hand, request = begin(server, scope, max_tokens=3)
            await until_busy(server, session_id)
            for index in range(3):
                clock.now += 100
                server.service.engine.sweep()
                model.allow()
                await hand.until_body_has(f'"index":{index}'.encode())
            await request
            assert sse(hand.body)[-1] == "[DONE]"
            clock.now += 0.5
            assert await server.length(session_id) == 4

    asyncio.run(main())


@pytest.mark.parametrize("accept", ["text/event-stream", "*/*"])
@pytest.mark.parametrize("verb", ["append", "generate", "open"])
def test_x04_the_time_to_live_counts_from_the_answers_last_byte(accept: str, verb: str) -> None:
    """The work is done long before a slow client has read of it."""

    async def main() -> None:
        clock = Clock()
        async with serving(clock=clock) as server:
            hand = Hand(write_blocks=True)
            if verb == "open":
                headers = {"content-type": "application/json"}
                scope = http_scope("POST", "/v1/sessions", headers=headers)
            else:
                opened = await server.open(token_ids=[1], ttl_seconds=1)
                scope = steps_scope(opened, verb, accept=accept)
            bodies = {
                "open": b'{"ttl_seconds": 1}',
                "append": b'{"token_ids": [2]}',
                "generate": b'{"max_tokens": 1}',
            }
            hand.feed(bodies[verb])
            request = asyncio.create_task(hand.run(server.app, scope))
            await asyncio.wait([request], timeout=0.2)
            await until_idle(server)
            clock.now += 100
            server.service.engine.sweep()
            hand.may_write.set()
            await request
            clock.now += 0.5
            told = (await server.client.get("/v1/sessions")).json()["data"]
            assert [session["past_length"] for session in told] == [0 if verb == "open" else 2]
            clock.now += 2
            assert (await server.client.get("/v1/sessions")).json()["data"] == []

    asyncio.run(main())

"""Which of two faults of one request is told."""

import asyncio
from typing import Any

import pytest

from tests.server.gating import gated, until_busy
from tests.server.serving import error_of


@pytest.mark.parametrize(
    ("target", "body", "code"),
    [
        ("none", {"prompt": ""}, "empty_input"),
        ("none", {"token_ids": [50257]}, "invalid_request"),
        ("busy", {"token_ids": [50257]}, "invalid_request"),
        ("none", {"prompt": "a" * 131_073}, "session_not_found"),
        ("none", {"token_ids": [1], "past_length": 9}, "session_not_found"),
        ("busy", {"token_ids": [1], "past_length": 9}, "session_busy"),
        ("busy", {"prompt": "a" * 131_073}, "session_busy"),
        ("busy", {"token_ids": [1] * 1025}, "session_busy"),
        ("free", {"prompt": "a" * 131_073, "past_length": 9}, "past_length_mismatch"),
        ("free", {"token_ids": [1] * 1025, "past_length": 9}, "past_length_mismatch"),
        ("free", {"token_ids": [50257], "past_length": 9}, "invalid_request"),
        ("free", {"prompt": "a" * 131_073}, "context_length_exceeded"),
        ("free", {"prompt": "a" * 131_073, "points_at": "0"}, "context_length_exceeded"),
    ],
)
def test_of_two_faults_of_an_append_the_first_in_order_is_told(
    target: str, body: dict[str, Any], code: str
) -> None:
    """Body, session, busy, expected length, context."""

    async def main() -> None:
        async with gated() as (server, model):
            ids = {"none": "sess_0", "free": await server.open(), "busy": await server.open()}
            model.close()
            path = f"/v1/sessions/{ids['busy']}/append"
            running = asyncio.create_task(server.post(path, token_ids=[1]))
            await until_busy(server, ids["busy"])
            answer = await server.post(f"/v1/sessions/{ids[target]}/append", **body)
            assert error_of(answer)["code"] == code
            model.open()
            assert (await running).status_code == 200
            assert await server.length(ids["free"]) == 0

    asyncio.run(main())

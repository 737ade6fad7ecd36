"""Forks that are refused or fail: they are no sessions, and say why."""

import asyncio
from typing import Any

import pytest

from tests.server.forking import (
    PROMPT,
    assert_as_alone,
    assert_no_session_is_left,
    fork,
    ids,
    tokens_of,
)
from tests.server.gating import gated, until_busy
from tests.server.serving import Serving, error_of, served, serving

pytestmark = pytest.mark.usefixtures("lively")


FAULTS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"at": 101}, 400, "invalid_request", "at"),
    ({"at": -1}, 400, "invalid_request", "at"),
    ({"at": 2**63 - 1, "token_ids": [1]}, 400, "invalid_request", "at"),
    ({"at": 1.0}, 400, "invalid_request", "at"),
    ({"past_length": 99}, 409, "past_length_mismatch", "past_length"),
    ({"prompt": ""}, 400, "empty_input", "prompt"),
    ({"token_ids": []}, 400, "empty_input", "token_ids"),
    ({"prompt": "a", "token_ids": [1]}, 400, "empty_input", "token_ids"),
    ({"token_ids": [50257]}, 400, "invalid_request", "token_ids"),
    ({"allow_special": True}, 400, "invalid_request", "allow_special"),
    ({"ttl_seconds": 0}, 400, "invalid_request", "ttl_seconds"),
    ({"metadata": {"a": 1}}, 400, "invalid_request", "metadata"),
    ({"to": 3}, 400, "invalid_request", "to"),
    ({"prepend_bos": True}, 400, "invalid_request", "prepend_bos"),
    ({"at": 50, "token_ids": [1] * 207}, 400, "context_length_exceeded", "token_ids"),
    ({"at": 50, "prompt": " a" * 207}, 400, "context_length_exceeded", "prompt"),
    ({"prompt": "a" * 131_073}, 400, "context_length_exceeded", "prompt"),
    # Of two faults: body, session, expected length, at, context.
    ({"token_ids": [50257], "past_length": 9}, 400, "invalid_request", "token_ids"),
    ({"past_length": 9, "at": 101}, 409, "past_length_mismatch", "past_length"),
    ({"past_length": 9, "prompt": "a" * 131_073}, 409, "past_length_mismatch", "past_length"),
    ({"at": 101, "prompt": "a" * 131_073}, 400, "invalid_request", "at"),
    ({"at": 101, "token_ids": [1] * 257}, 400, "invalid_request", "at"),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), FAULTS)
def test_a_refused_fork_is_no_session(
    body: dict[str, Any], status: int, code: str, param: str
) -> None:
    async def main() -> None:
        async with serving() as server:
            parent = await server.open(token_ids=PROMPT)
            answer = await server.post(f"/v1/sessions/{parent}/fork", **body)
            told = error_of(answer)
            assert (answer.status_code, told["code"], told["param"]) == (status, code, param)
            assert await ids(server) == [parent]
            assert await tokens_of(server, parent) == PROMPT

    asyncio.run(main())


@served
async def test_refusals_tell_the_numbers(server: Serving) -> None:
    path = f"/v1/sessions/{await server.open(token_ids=PROMPT)}/fork"
    assert error_of(await server.post(path, at=101))["past_length"] == 100
    told = error_of(await server.post(path, past_length=7))
    assert (told["expected"], told["past_length"]) == (7, 100)
    told = error_of(await server.post(path, at=50, token_ids=[1] * 207))
    assert (told["n_ctx"], told["past_length"], told["n_new"]) == (256, 50, 207)
    full = await server.post(path, at=50, token_ids=[1] * 206)
    assert (full.status_code, full.json()["remaining"]) == (201, 0)


@served
async def test_a_fork_of_nobody(server: Serving) -> None:
    for body in ({}, {"past_length": 9}, {"prompt": "a" * 131_073}, {"at": 5}):
        answer = await server.post("/v1/sessions/sess_0/fork", **body)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "session_not_found")


def test_a_fork_whose_tokens_fail_is_no_session() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            parent = await server.open(token_ids=PROMPT)
            model.fails = True
            answer = await server.post(f"/v1/sessions/{parent}/fork", token_ids=[1])
            assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
            model.fails = False
            assert await ids(server) == [parent]
            await assert_as_alone(server, await fork(server, parent, token_ids=[1]))

    asyncio.run(main())


def test_s02_a_fork_whose_client_leaves_is_no_session() -> None:
    asyncio.run(assert_no_session_is_left(token_ids=[1] * 100))


def test_a_fork_counts_as_a_session_and_as_work() -> None:
    async def main() -> None:
        async with gated(max_sessions=2, max_queue=1) as (server, model):
            parent = await server.open(token_ids=PROMPT)
            model.close()
            path = f"/v1/sessions/{parent}"
            running = asyncio.create_task(server.post(f"{path}/append", token_ids=[2]))
            await until_busy(server, parent)
            full = await server.post(f"{path}/fork")
            assert (full.status_code, error_of(full)["code"]) == (429, "queue_full")
            assert full.headers["retry-after"]
            model.open()
            assert (await running).status_code == 200
            await fork(server, parent)
            full = await server.post(f"{path}/fork")
            assert (full.status_code, error_of(full)["code"]) == (429, "too_many_sessions")
            assert full.headers["retry-after"]
            assert len(await ids(server)) == 2

    asyncio.run(main())

"""Interventions that are refused over HTTP: which fault is told, and that nothing changed."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.server.editing import (
    DIRECTION,
    WIDTH,
    kept_vector,
    refused,
    replaced,
    scaled,
    state,
    steps,
)
from tests.server.forking import PROMPT, ids
from tests.server.serving import Serving, error_of, served, serving

pytestmark = pytest.mark.usefixtures("lively")


@served
async def test_refusals_change_nothing(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:5])
    flat = await kept_vector(server, DIRECTION.reshape(1, WIDTH))
    zero = await kept_vector(server, np.zeros(WIDTH, np.float32))
    project = [{"point": "resid_pre.1", "op": "project", "value": {"vector": zero}}]
    mask = [{"point": "scores.0", "op": "mask", "keys": "0:6"}]
    table: list[tuple[list[dict[str, Any]], int, str, str]] = [
        (scaled("4"), 400, "position_committed", "fork the session with `at` there and `replay"),
        (scaled("4:"), 400, "position_committed", "past_length is 5"),
        (scaled("5:9"), 400, "invalid_request", "5 to 5"),
        (scaled("6:"), 400, "invalid_request", "5 to 5"),
        (mask, 400, "invalid_request", "hides every key of the step at 5"),
        (project, 400, "invalid_request", "direction"),
        (replaced(vector="vec_0"), 404, "vector_not_found", "PUT /v1/vectors"),
        (replaced(vector=flat), 400, "invalid_request", "[1, 32], and resid_pre.1 has [32]"),
        (replaced(session="sess_0", position=0), 404, "session_not_found", "sess_0"),
        (replaced(session=session_id, position=5), 400, "invalid_request", "past_length is 5"),
        (replaced(param="wpe"), 400, "invalid_request", "[256, 32], and resid_pre.1 has [32]"),
        (replaced(param="wpe[256]"), 400, "invalid_request", "rows 0 to 255"),
        (replaced(param="wqe[0]"), 400, "invalid_request", "did you mean"),
        (replaced(data=[1.0]), 400, "invalid_request", "shape"),
    ]
    for interventions, status, code, message in table:
        told = await refused(server, session_id, token_ids=[1], interventions=interventions)
        assert (told["status"], told["code"]) == (status, code)
        assert message in told["message"]
    assert ((await state(server, session_id))["past_length"], await ids(server)) == (
        5,
        [session_id],
    )
    assert server.service.answers.held_bytes == 0


@served
async def test_the_first_fault_in_order_is_told(server: Serving) -> None:
    """Body, session, expected length, what is cheap of the interventions, text, values."""
    session_id = await server.open(token_ids=PROMPT[:5])
    bad = replaced(data=[1.0])
    missing = replaced(vector="vec_0")
    long = "a" * 131_073
    order: list[tuple[str, dict[str, Any], str]] = [
        ("sess_0", {"token_ids": [1], "interventions": bad}, "invalid_request"),
        ("sess_0", {"token_ids": [1], "interventions": missing}, "session_not_found"),
        (session_id, {"prompt": long, "interventions": bad}, "invalid_request"),
        (session_id, {"prompt": long, "interventions": missing}, "context_length_exceeded"),
        (
            session_id,
            {"token_ids": [1], "past_length": 9, "interventions": missing},
            "past_length_mismatch",
        ),
        (session_id, {"token_ids": [1] * 300, "interventions": missing}, "vector_not_found"),
    ]
    for target, body, code in order:
        answer = await server.post(f"/v1/sessions/{target}/append", **body)
        assert error_of(answer)["code"] == code, body


@served
async def test_edits_that_lead_nowhere_are_the_clients_fault(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:5])
    huge = [{"point": "resid_post.1", "op": "scale", "scale": 3e38}] * 2
    halves = [
        {"point": "scores.0", "op": "mask", "keys": "0:3"},
        {"point": "scores.0", "op": "mask", "keys": "3:"},
    ]
    for interventions in (huge, halves):
        told = await refused(server, session_id, token_ids=[1], interventions=interventions)
        assert (told["status"], told["code"]) == (400, "invalid_request")
        assert "finite" in told["message"]
        assert await server.length(session_id) == 5
    assert len(await steps(server, session_id, token_ids=[1])) == 1


def test_edits_that_histories_have_no_room_for_are_a_507() -> None:
    async def main() -> None:
        async with serving(edit_budget=10_000) as server:
            session_id = await server.open()
            body: dict[str, Any] = {"interventions": [{"point": "z.0", "op": "scale", "scale": 0}]}
            assert len(await steps(server, session_id, token_ids=[1, 2], **body)) == 2
            told = await refused(server, session_id, token_ids=[1] * 200, **body)
            assert (told["status"], told["code"]) == (507, "edits_full")
            assert told["n_bytes"] > told["max_bytes"] == 10_000

    asyncio.run(main())


def test_what_records_tell_of_edits_counts_into_the_size_of_an_answer() -> None:
    async def main() -> None:
        async with serving(max_response_bytes=100_000) as server:
            session_id = await server.open()
            body: dict[str, Any] = {"token_ids": PROMPT[:32], "points": []}
            many = [{"point": "z.0", "op": "scale", "scale": 2}] * 20
            path = f"/v1/sessions/{session_id}"
            for verb, extra in (("append", {}), ("fork", {"at": 0})):
                answer = await server.post(f"{path}/{verb}", **body, **extra, interventions=many)
                assert (answer.status_code, error_of(answer)["code"]) == (400, "response_too_large")
            assert len(await steps(server, session_id, **body)) == 32
            generated = {"max_tokens": 32, "points": [], "interventions": many}
            answer = await server.post(f"{path}/generate", **generated)
            assert (answer.status_code, error_of(answer)["code"]) == (400, "response_too_large")

    asyncio.run(main())


def test_q14_large_values_are_read_beside_other_requests() -> None:
    """A body of as many numbers as one may have, and one of as many bytes."""

    async def main() -> None:
        async with serving() as server:
            session_id = await server.open()
            numbers = [[0.5] * 4000] * 64
            text = "A" * (12 * 2**20)
            for interventions in (
                [{"point": "ln_f", "op": "add", "value": {"data": data}} for data in numbers],
                [{"point": "ln_f", "op": "add", "value": {"data": text, "shape": [WIDTH]}}],
            ):
                told = await refused(server, session_id, token_ids=[1], interventions=interventions)
                assert (told["status"], told["code"]) == (400, "invalid_request")
            assert await server.length(session_id) == 0

    asyncio.run(main())

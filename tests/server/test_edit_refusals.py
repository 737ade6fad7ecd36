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
        (mask, 400, "invalid_request", "leaves the step at 5 no key"),
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
    """Body, session, expected length, text, context, reach, masks that leave no key, values."""
    session_id = await server.open(token_ids=PROMPT[:5])
    bad = replaced(data=[1.0])
    missing = replaced(vector="vec_0")
    early, hidden = scaled("4"), [{"point": "scores.0", "op": "mask", "keys": ":"}]
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
        (session_id, {"token_ids": [1] * 300, "interventions": missing}, "context_length_exceeded"),
        (session_id, {"token_ids": [1] * 300, "interventions": hidden}, "context_length_exceeded"),
        (session_id, {"token_ids": [1], "interventions": early + missing}, "position_committed"),
        (session_id, {"token_ids": [1], "interventions": early + hidden}, "position_committed"),
        (session_id, {"token_ids": [1], "interventions": hidden + missing}, "invalid_request"),
        (session_id, {"token_ids": [1], "interventions": missing}, "vector_not_found"),
    ]
    for target, body, code in order:
        answer = await server.post(f"/v1/sessions/{target}/append", **body)
        assert error_of(answer)["code"] == code, body


@served
async def test_no_value_is_looked_for_where_its_steps_cannot_be(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:5])
    missing = replaced(session=session_id, position=2) + replaced(vector="vec_0")
    for verb, few, many in (
        ("append", {"token_ids": [1]}, {"token_ids": [1] * 300}),
        ("generate", {"max_tokens": 1}, {"max_tokens": 300}),
        ("fork", {"at": 3, "replay": True}, {"at": 3, "replay": True, "token_ids": [1] * 300}),
    ):
        for body, others, code in (
            (many, [], "context_length_exceeded"),
            (many, scaled("2"), "context_length_exceeded"),
            (few, scaled("2"), "position_committed"),
            (few, scaled("9:"), "invalid_request"),
            (few, [], "vector_not_found"),
        ):
            path = f"/v1/sessions/{session_id}/{verb}"
            answer = await server.post(path, **body, interventions=missing + others)
            assert error_of(answer)["code"] == code, (verb, body, others)


@served
async def test_edits_that_lead_nowhere_are_the_clients_fault(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:5])
    huge = [{"point": "resid_post.1", "op": "scale", "scale": 3e38}] * 2
    signs = np.repeat([1.6e38, -1.6e38], WIDTH // 2).tolist()
    overflow = [{"point": "ln_f", "op": "replace", "value": {"data": signs}}]
    for interventions in (huge, overflow):
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


def test_the_step_whose_edits_are_the_longest_text_counts() -> None:
    """A mask of many keys, not two edits of little to tell."""

    async def main() -> None:
        async with serving(max_response_bytes=250_000) as server:
            session_id = await server.open(token_ids=PROMPT[:1])
            keys = ",".join(map(str, range(2, 256, 2)))
            edits: list[dict[str, Any]] = [
                {"point": "scores.0", "op": "mask", "keys": keys, "positions": "1"}
            ]
            edits += [{"point": "z.0", "op": "scale", "scale": 2, "positions": "2"}] * 2
            body = {"token_ids": PROMPT[1:], "points": [], "interventions": edits}
            path = f"/v1/sessions/{session_id}"
            streamed = await server.post(f"{path}/append", **body, stream=True)
            assert streamed.status_code == 200
            replay = {"at": 0, "replay": True, "points": []}
            for answer in (
                await server.post(f"{path}/fork", **replay),
                await server.client.get(f"{path}/activations", params={"points": "z.0[0]"}),
            ):
                told = error_of(answer)
                assert (answer.status_code, told["code"]) == (400, "response_too_large")
            dropped = await server.post(f"{path}/fork", **replay, edits="drop")
            assert dropped.status_code == 201

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

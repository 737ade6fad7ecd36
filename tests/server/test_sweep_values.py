"""What a sweep edits with: fetched once, held once, and bounded as its answer is."""

import asyncio
from typing import Any

import pytest

from server.interventions.values import resolve_held
from server.studies import sweeping
from sessions.edits import Value
from tests.server.editing import DIRECTION, kept_vector
from tests.server.forking import PROMPT
from tests.server.gating import begin, gated, steps_scope, until_idle
from tests.server.serving import Serving, error_of, serving

pytestmark = pytest.mark.usefixtures("lively")

POINTS = ["logits[5]"]
ROW_BYTES = 4 * len(DIRECTION)


def adding(value: dict[str, Any], **axes: str) -> dict[str, Any]:
    intervention = {"point": "resid_post", "op": "add", "value": value}
    return {"axes": {"layer": "*"} | axes, "intervention": intervention, "points": POINTS}


async def opened(server: Serving) -> str:
    return await server.open(token_ids=PROMPT[:9])


def test_values_are_held_until_the_answer_is_sent() -> None:
    async def main() -> None:
        async with gated(max_rows=4) as (server, model):
            source, session_id = await opened(server), await opened(server)
            held: list[int] = []
            for body in (
                adding({"data": DIRECTION.tolist()}, position="*"),  # one value for all cells
                adding({"session": source}, position="*"),
            ):
                n_passes = model.n_passes
                model.close()
                _, task = begin(server, steps_scope(session_id, "sweep"), **body)
                while model.n_passes < n_passes + 4:  # the cells are under way
                    model.allow()
                    await asyncio.sleep(0.001)
                held.append(server.service.answers.held_bytes)
                model.open()
                await task
                await until_idle(server)
                assert server.service.answers.held_bytes == 0
            assert held[1] - held[0] == (2 * 9 - 1) * ROW_BYTES

    asyncio.run(main())


VALUE_BYTES = 2 * sum(4 * 2 * (position + 1) for position in range(240, 256))
"""Of the patterns below, which are more than the answer has."""


async def two_sessions(server: Serving) -> tuple[str, dict[str, Any]]:
    source, session_id = [await server.open(token_ids=PROMPT[:1] * 256) for _ in range(2)]
    body = {
        "axes": {"layer": "*", "position": "240:256"},
        "intervention": {"point": "pattern", "op": "replace", "value": {"session": source}},
        "points": ["ln_f_scale"],
    }
    return f"/v1/sessions/{session_id}/sweep", body


def test_too_many_values_are_refused_before_anything_is_computed() -> None:
    async def main() -> None:
        async with gated(max_response_bytes=VALUE_BYTES - 1) as (server, model):
            path, body = await two_sessions(server)
            n_passes = model.n_passes
            answer = await server.post(path, **body)
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (400, "response_too_large")
            assert (error["param"], error["n_bytes"]) == ("intervention", VALUE_BYTES)
            assert "the values" in error["message"]
            assert model.n_passes == n_passes
            assert server.service.answers.held_bytes == 0

    asyncio.run(main())


def test_values_that_others_leave_no_room_for_are_refused_at_once() -> None:
    async def main() -> None:
        async with gated(max_response_bytes=200_000) as (server, model):
            path, body = await two_sessions(server)
            answers, n_passes = server.service.answers, model.n_passes
            with answers.lease(answers.max_bytes - VALUE_BYTES):  # room for the answer alone
                answer = await server.post(path, **body)
                assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
                assert answers.held_bytes == answers.max_bytes - VALUE_BYTES
            assert model.n_passes == n_passes
            assert (await server.post(path, **body)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("source", ["data", "vector", "param", "session"])
def test_one_source_is_one_value_for_all_cells(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sweeping, "_SLICE", 2)
    values: list[Value | None] = []

    async def resolve(*arguments: Any) -> Any:
        made = await resolve_held(*arguments)
        values.extend(one.edit.value for one in made)
        return made

    monkeypatch.setattr(sweeping, "resolve_held", resolve)

    async def main() -> None:
        async with serving() as server:
            session_id = await opened(server)
            sources: dict[str, dict[str, Any]] = {
                "data": {"data": DIRECTION.tolist()},
                "vector": {"vector": await kept_vector(server, DIRECTION)},
                "param": {"param": "ln_f.weight"},
                "session": {"session": session_id, "position": 3, "point": "resid_post.0"},
            }
            body = adding(sources[source]) | {"axes": {"layer": "*", "position": "4:7"}}
            answer = await server.post(f"/v1/sessions/{session_id}/sweep", **body)
            assert answer.status_code == 200, answer.text

    asyncio.run(main())
    assert len(values) == 6
    assert len({id(value) for value in values}) == 1

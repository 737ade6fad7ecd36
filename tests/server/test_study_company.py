"""Sessions that are rolled back or deleted while they are studied."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from server.interventions.values import resolve_held
from server.negotiation import Form
from server.studies import sweeping
from tests.server.decoding import STREAMS, told
from tests.server.forking import PROMPT, ids
from tests.server.gating import begin, gated, steps_scope, until_idle
from tests.server.hand import Hand, http_scope, until
from tests.server.serving import Gated, Serving, error_of, serving

pytestmark = pytest.mark.usefixtures("lively")

GRID: dict[str, Any] = {
    "axes": {"layer": "*", "position": "*"},
    "intervention": {"point": "attn_out", "op": "scale", "scale": 0},
    "points": ["logits[5]"],
}
Study = Callable[[Serving, str], tuple[Hand, asyncio.Task[None]]]


def sweep(form: Form) -> Study:
    return lambda server, session_id: begin(
        server, steps_scope(session_id, "sweep", accept=form.value), **GRID
    )


def verify(server: Serving, session_id: str) -> tuple[Hand, asyncio.Task[None]]:
    return begin(server, steps_scope(session_id, "verify"))


def compare(server: Serving, session_id: str) -> tuple[Hand, asyncio.Task[None]]:
    headers = {"content-type": "application/json"}
    scope = http_scope("POST", "/v1/compare", headers=headers)
    return begin(server, scope, a=session_id, b=session_id)


def activations(form: Form) -> Study:
    def study(server: Serving, session_id: str) -> tuple[Hand, asyncio.Task[None]]:
        path = f"/v1/sessions/{session_id}/activations?points=resid_post.0"
        hand = Hand()
        hand.feed()
        scope = http_scope("GET", path, headers={"accept": form.value})
        return hand, asyncio.create_task(hand.run(server.app, scope))

    return study


async def deleted(server: Serving, model: Gated, study: Study, *, after: int) -> Hand:
    """What a study answers whose session is deleted `after` as many of its passes."""
    session_id = await server.open(token_ids=PROMPT[:40])
    n_passes = model.n_passes
    model.close()
    hand, task = study(server, session_id)
    model.allow(after)
    await until(lambda: model.n_passes == n_passes + after)
    deleting = asyncio.create_task(server.client.delete(f"/v1/sessions/{session_id}"))
    await until(lambda: session_id not in server.service.engine.registry._entries)
    model.open()
    assert (await deleting).status_code == 200
    await task
    await until_idle(server)
    assert not server.service.engine._thread.places._places
    assert server.service.answers.held_bytes == 0
    return hand


@pytest.mark.parametrize(
    "study", [verify, compare, sweep(Form.JSON), activations(Form.JSON), activations(Form.STACKED)]
)
def test_a_study_of_a_session_that_is_deleted_is_refused_so(study: Study) -> None:
    async def main() -> None:
        async with gated(prefill_chunk=4, max_rows=2) as (server, model):
            hand = await deleted(server, model, study, after=1)
            assert (hand.status, hand.json["error"]["code"]) == (410, "session_deleted")
            assert await ids(server) == []

    asyncio.run(main())


@pytest.mark.parametrize("form", STREAMS)
@pytest.mark.parametrize(("study", "after"), [(sweep, 3), (activations, 1)])
def test_its_stream_ends_so(form: Form, study: Callable[[Form], Study], after: int) -> None:
    async def main() -> None:
        async with gated(prefill_chunk=4, max_rows=2) as (server, model):
            hand = await deleted(server, model, study(form), after=after)
            ending = told(form, hand.body)[-1].record
            assert (hand.status, ending["error"]["code"]) == (200, "session_deleted")

    asyncio.run(main())


def between_slices(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], Awaitable[object]]
) -> list[int]:
    """Have values fetched for two cells at a time, and `act` done after the first two."""
    monkeypatch.setattr(sweeping, "_SLICE", 2)
    sizes: list[int] = []

    async def resolve(service: Any, plan: Any, found: Any) -> Any:
        made = await resolve_held(service, plan, found)
        sizes.append(len(plan))
        if len(sizes) == 1:
            await act()
        return made

    monkeypatch.setattr(sweeping, "resolve_held", resolve)
    return sizes


@pytest.mark.parametrize(
    ("positions", "to", "status"),
    [("0:6", 5, 409), ("0:6", 2, 409), ("0:4", 6, 200), ("0:6", None, 410)],
)
def test_a_source_is_one_history_or_none(
    monkeypatch: pytest.MonkeyPatch, positions: str, to: int | None, status: int
) -> None:
    async def main() -> None:
        async with serving() as server:
            source = await server.open(token_ids=PROMPT[20:30])
            session_id = await server.open(token_ids=PROMPT[:6])

            async def change() -> None:
                path = f"/v1/sessions/{source}"
                if to is None:
                    await server.client.delete(path)
                    return
                await server.post(f"{path}/truncate", to=to)
                await server.post(f"{path}/append", token_ids=[9] * (10 - to))

            sizes = between_slices(monkeypatch, change)
            value = {"session": source}
            intervention = {"point": "resid_pre.1", "op": "replace", "value": value}
            answer = await server.post(
                f"/v1/sessions/{session_id}/sweep",
                axes={"position": positions},
                intervention=intervention,
                points=["logits[5]"],
                at=5,
            )
            assert answer.status_code == status, answer.text
            if status != 200:
                code = {409: "session_changed", 410: "session_deleted"}[status]
                assert error_of(answer)["code"] == code
                assert error_of(answer)["param"] == "intervention"
                assert sizes == [2]

    asyncio.run(main())

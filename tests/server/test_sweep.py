"""Sweeps over HTTP: whole grids against full passes, in every form, bounded, and gone when left."""

import asyncio
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from model.points import parse_point
from server.negotiation import Form
from server.studies.answers import Swept
from sessions.edits import Edit, Value
from tests.agreement import assert_agrees
from tests.reference import reference_points
from tests.server.decoding import STREAMS, accepting, told
from tests.server.forking import LIVELY, PROMPT, ids
from tests.server.gating import begin, gated, steps_scope, until_idle
from tests.server.serving import Serving, error_of, served, serving

pytestmark = pytest.mark.usefixtures("lively")

CLEAN, CORRUPT = PROMPT[:7], PROMPT[20:27]
LOGITS = "logits[318,262]"
ZERO = {"point": "attn_out", "op": "scale", "scale": 0}


def patch(point: str, source: str) -> dict[str, Any]:
    return {"point": point, "op": "replace", "value": {"session": source}}


async def swept(server: Serving, session_id: str, **body: Any) -> Any:
    path = f"/v1/sessions/{session_id}/sweep"
    answer = await server.post(path, **({"encoding_format": "float", "points": [LOGITS]} | body))
    assert answer.status_code == 200, answer.text
    return answer.json()


@cache
def clean_points() -> dict[str, Tensor]:
    return reference_points(LIVELY, CLEAN)


def expected_logits(point: str, position: int, at: int) -> np.ndarray:
    """Of a full pass over the corrupt ids with one place of the clean ones in it."""
    whole = parse_point(point, LIVELY.config)
    row = whole.select(clean_points()[str(whole.whole)][position].numpy())
    value = Value(row.shape, np.ascontiguousarray(row, "<f4").tobytes())
    edits = {position: (Edit(point=point, op="replace", value=value),)}
    points = reference_points(LIVELY, CORRUPT, edits=edits)
    return np.asarray(points["logits"][at, [318, 262]])


@served
async def test_the_grid_of_residuals_is_that_of_full_passes(server: Serving) -> None:
    clean, corrupt = await server.open(token_ids=CLEAN), await server.open(token_ids=CORRUPT)
    axes = {"layer": "0:2", "position": "0:7", "head": None}
    body = {"axes": axes, "intervention": patch("resid_pre", clean)}
    told = await swept(server, corrupt, **body)
    Swept.model_validate(told, strict=True)
    assert (told["object"], told["at"]) == ("sweep", 6)
    assert told["axes"] == [
        {"name": "layer", "values": [0, 1]},
        {"name": "position", "values": [0, 1, 2, 3, 4, 5, 6]},
    ]
    grid = told["points"][LOGITS]
    assert (grid["shape"], grid["axes"]) == ([2, 7, 2], ["layer", "position", "n_vocab"])
    for layer in range(2):
        for position in range(7):
            expected = expected_logits(f"resid_pre.{layer}", position, 6)
            assert_agrees(grid["data"][layer][position], expected)
    for name, known in (("baseline", CORRUPT), ("source", CLEAN)):
        row = reference_points(LIVELY, known)["logits"][6, [318, 262]]
        assert_agrees(told[name][LOGITS]["data"], row, what=name)
    assert told["usage"] == {"cells": 14, "steps": 2 * sum(range(1, 8))}
    assert await ids(server) == [corrupt, clean]
    assert await server.length(corrupt) == 7


@served
async def test_the_grid_of_heads_by_position_is_that_of_full_passes(server: Serving) -> None:
    clean, corrupt = await server.open(token_ids=CLEAN), await server.open(token_ids=CORRUPT)
    body = {
        "axes": {"layer": "*", "position": "1,5", "head": "*"},
        "intervention": patch("blocks.*.attn.hook_z", clean),
    }
    grid = (await swept(server, corrupt, **body, at=5))["points"][LOGITS]["data"]
    for layer in range(2):
        for index, position in enumerate((1, 5)):
            for head in range(2):
                expected = expected_logits(f"z.{layer}[{head}]", position, 5)
                assert_agrees(grid[layer][index][head], expected)


@served
async def test_cells_after_the_position_that_is_read_are_the_baseline(server: Serving) -> None:
    session_id = await server.open(token_ids=CORRUPT)
    body = {"axes": {"position": "*"}, "intervention": ZERO | {"point": "attn_out.1"}, "at": 3}
    told = await swept(server, session_id, **body)
    assert told["usage"] == {"cells": 7, "steps": 4 + 3 + 2 + 1}
    grid, baseline = told["points"][LOGITS]["data"], told["baseline"][LOGITS]["data"]
    assert grid[4:] == [baseline] * 3
    assert all(one != baseline for one in grid[3:4])
    assert told["source"] is None


@served
async def test_what_is_not_swept_the_template_says(server: Serving) -> None:
    session_id = await server.open(token_ids=CORRUPT)
    intervention = {"point": "z", "op": "scale", "scale": 0, "positions": "2,4:"}
    body = {"axes": {"head": "1", "layer": "*"}, "intervention": intervention}
    grid = (await swept(server, session_id, **body))["points"][LOGITS]["data"]
    for layer in range(2):
        edit = Edit(point=f"z.{layer}[1]", op="scale", scale=0.0)
        edits = dict.fromkeys((2, 4, 5, 6), (edit,))
        expected = reference_points(LIVELY, CORRUPT, edits=edits)["logits"][6, [318, 262]]
        assert_agrees(grid[layer][0], expected)


@served
async def test_a_shorter_source_has_no_baseline_there(server: Serving) -> None:
    clean, corrupt = await server.open(token_ids=CLEAN[:3]), await server.open(token_ids=CORRUPT)
    body = {"axes": {"position": "0:3"}, "intervention": patch("resid_pre.1", clean)}
    assert (await swept(server, corrupt, **body, at=5))["source"] is None
    last = (await swept(server, corrupt, **body))["source"][LOGITS]["data"]
    assert_agrees(last, reference_points(LIVELY, CLEAN[:3])["logits"][2, [318, 262]])
    path = f"/v1/sessions/{corrupt}/sweep"
    refused = await server.post(path, **(body | {"axes": {"position": "*"}}), points=[LOGITS])
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "intervention"
    assert "position 3" in error_of(refused)["message"]


@pytest.mark.parametrize("form", STREAMS)
def test_a_stream_tells_how_far_it_is_and_then_the_same(form: Form) -> None:
    async def main() -> None:
        async with serving() as server:
            clean = await server.open(token_ids=CLEAN)
            corrupt = await server.open(token_ids=CORRUPT)
            body = {
                "axes": {"layer": "*", "position": "*"},
                "intervention": patch("resid_pre", clean),
                "points": [LOGITS, "blocks.1.hook_resid_post"],
            }
            path = f"/v1/sessions/{corrupt}/sweep"
            whole = await swept(server, corrupt, **body)
            stream = await server.client.post(path, json=body, headers=accepting(form))
            *progress, sweep, done = told(form, stream.content)
            assert [one.record for one in progress] == [
                {"object": "progress", "done": n, "total": 14} for n in range(1, 15)
            ]
            assert done.record["usage"] == whole["usage"]
            assert done.record["session"]["past_length"] == 7
            for name, tensor in whole["points"].items():
                expected = np.array(tensor["data"], np.float32)
                np.testing.assert_allclose(sweep.points[name], expected, rtol=1e-4, atol=1e-4)
            assert sweep.record["axes"] == whole["axes"]
            assert sweep.record["aliases"] == {"blocks.1.hook_resid_post": "resid_post.1"}
            if form is Form.FRAMES:
                beside = {
                    f"{part}/{name}" for part in ("baseline", "source") for name in whole[part]
                }
                assert sweep.points.keys() == whole["points"].keys() | beside
                one = whole["source"][LOGITS]["data"]
                np.testing.assert_allclose(sweep.points[f"source/{LOGITS}"], one, rtol=1e-4)
            else:
                assert sweep.record.keys() == whole.keys() - {"points"}

    asyncio.run(main())


def adding(value: dict[str, Any]) -> dict[str, Any]:
    return {"intervention": {"point": "z", "op": "add", "value": value}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"axes": {}}, "invalid_request", "axes"),
    ({"axes": {"layer": None}}, "invalid_request", "axes"),
    ({"axes": {"layer": "2"}}, "invalid_request", "axes"),
    ({"axes": {"layer": [0]}}, "invalid_request", "axes"),
    ({"axes": {"position": "7"}}, "invalid_request", "axes"),
    ({"axes": {"neuron": "1"}}, "invalid_request", "axes"),
    ({"axes": "layer"}, "invalid_request", "axes"),
    ({"at": 7}, "invalid_request", "at"),
    ({"at": -2}, "invalid_request", "at"),
    ({"at": 1.0}, "invalid_request", "at"),
    ({"points": []}, "invalid_request", "points"),
    ({"points": ["x"]}, "unknown_point", "points"),
    ({"points": None}, "invalid_request", "points"),
    (
        {"points": ["logits"], "axes": {"position": "*", "layer": "*"}},
        "response_too_large",
        "points",
    ),
    ({"intervention": []}, "invalid_request", "intervention"),
    ({"intervention": {"point": "z"}}, "invalid_request", "intervention"),
    ({"intervention": ZERO | {"extra": 1}}, "invalid_request", "intervention"),
    ({"intervention": ZERO | {"point": "attn_in"}}, "unknown_point", "intervention"),
    ({"intervention": ZERO | {"positions": "5:8"}}, "invalid_request", "intervention"),
    ({"intervention": ZERO | {"positions": "9:"}}, "invalid_request", "intervention"),
    (adding({"data": [1]}), "invalid_request", "intervention"),
    (adding({"vector": "v"}), "vector_not_found", "intervention"),
    (adding({"param": "wte[1]"}), "invalid_request", "intervention"),
    (adding({"session": "sess_0", "position": 1}), "session_not_found", "intervention"),
]


def test_bad_bodies_are_refused_before_anything_is_stepped() -> None:
    async def main() -> None:
        async with gated(max_response_bytes=2_000_000) as (server, model):
            session_id = await server.open(token_ids=CORRUPT)
            n_passes = model.n_passes
            good: dict[str, Any] = {
                "axes": {"layer": "*"},
                "intervention": ZERO,
                "points": [LOGITS],
            }
            path = f"/v1/sessions/{session_id}/sweep"
            for accept in ("*/*", Form.SSE.value):
                for body, code, param in BAD:
                    said = json.dumps(good | body)
                    headers = {"content-type": "application/json", "accept": accept}
                    answer = await server.client.post(path, content=said, headers=headers)
                    assert 400 <= answer.status_code < 500, (body, answer.text)
                    assert (error_of(answer)["code"], error_of(answer)["param"]) == (code, param)
            baseline_and_no_cells = model.n_passes - n_passes
            assert baseline_and_no_cells <= 2 * len(BAD)
            assert server.service.answers.held_bytes == 0
            assert (await server.post(path, **good)).status_code == 200
            missing = await server.post("/v1/sessions/sess_0/sweep", **good)
            assert error_of(missing)["code"] == "session_not_found"
            empty = await server.open()
            refused = await server.post(f"/v1/sessions/{empty}/sweep", **good)
            assert error_of(refused)["param"] == "at"

    asyncio.run(main())


@pytest.mark.parametrize("form", [Form.JSON, *STREAMS])
def test_a_client_that_leaves_ends_it_within_a_step_and_no_branch_is_kept(form: Form) -> None:
    async def main() -> None:
        async with gated(max_rows=4) as (server, model):
            session_id = await server.open(token_ids=CORRUPT)
            model.close()
            body = {
                "axes": {"layer": "*", "position": "*"},
                "intervention": ZERO,
                "points": [LOGITS],
            }
            scope = steps_scope(session_id, "sweep", accept=form.value)
            hand, task = begin(server, scope, **body)
            n_passes = model.n_passes
            while model.n_passes < n_passes + 4:
                model.allow()
                await asyncio.sleep(0.001)
            hand.disconnect()
            await task
            seen = model.n_passes
            model.open()
            await until_idle(server)
            assert model.n_passes <= seen + 2
            assert await ids(server) == [session_id]
            assert server.service.answers.held_bytes == 0
            engine = server.service.engine
            assert set(engine._thread.places._places) == {session_id}

    asyncio.run(main())


def test_a_fault_in_a_cell_ends_a_stream_with_an_error() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=CORRUPT)
            body = {
                "axes": {"layer": "*"},
                "intervention": {"point": "mlp_out", "op": "scale", "scale": 3e38},
                "points": [LOGITS],
            }
            path = f"/v1/sessions/{session_id}/sweep"
            answer = await server.post(path, **body)
            assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request")
            for form in STREAMS:
                stream = await server.client.post(path, json=body, headers=accepting(form))
                ending = told(form, stream.content)[-1].record
                assert ending["error"]["code"] == "invalid_request"
                assert ending["session"]["past_length"] == 7
            model.fails = True
            answer = await server.post(path, **(body | {"intervention": ZERO}))
            assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")

    asyncio.run(main())


def test_mates_are_stepped_meanwhile_and_not_refused() -> None:
    async def main() -> None:
        async with serving(max_queue=4) as server:
            session_id, other = await server.open(token_ids=CORRUPT), await server.open()
            body = {"axes": {"layer": "*", "position": "*"}, "intervention": ZERO}
            sweeping = asyncio.create_task(swept(server, session_id, **body))
            lengths = []
            while not sweeping.done():
                answer = await server.post(f"/v1/sessions/{other}/append", token_ids=[5])
                lengths.append(answer.status_code)
                await asyncio.sleep(0.01)
            assert (await sweeping)["usage"]["cells"] == 14
            assert set(lengths) <= {200}  # however many cells there are, nobody else is refused
            assert await server.length(other) == lengths.count(200)

    asyncio.run(main())

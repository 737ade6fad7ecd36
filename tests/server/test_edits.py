"""Interventions over HTTP: where their numbers come from, what they change, what they leave."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.agreement import assert_agrees
from tests.server.editing import (
    DIRECTION,
    kept_vector,
    state,
    steps,
    tensor,
)
from tests.server.forking import PROMPT, fork
from tests.server.gating import gated, until_busy
from tests.server.serving import Serving, error_of, served, serving, vector

pytestmark = pytest.mark.usefixtures("lively")


@served
async def test_steering_by_a_kept_vector(server: Serving) -> None:
    plain, steered = await server.open(), await server.open()
    add = {
        "point": "resid_post.0",
        "positions": "2:",
        "op": "add",
        "value": {"vector": await kept_vector(server, DIRECTION)},
        "scale": 4.0,
    }
    body: dict[str, Any] = {"token_ids": PROMPT[:5], "points": ["resid_post.0", "logits"]}
    before = await steps(server, plain, **body)
    after = await steps(server, steered, **body, interventions=[add])
    for a, b in zip(before[:2], after[:2], strict=True):
        assert b["edited"] == []
        assert_agrees(vector(a, "logits"), vector(b, "logits"))
    for a, b in zip(before[2:], after[2:], strict=True):
        assert [(one["point"], one["op"], one["scale"]) for one in b["edited"]] == [
            ("resid_post.0", "add", 4.0)
        ]
        assert np.abs(vector(a, "logits") - vector(b, "logits")).max() > 0.01
    first = vector(before[2], "resid_post.0") + 4 * DIRECTION
    assert_agrees(vector(after[2], "resid_post.0"), first)
    assert ((await state(server, plain))["edits"], (await state(server, steered))["edits"]) == (
        0,
        3,
    )


@served
async def test_an_open_slice_reaches_what_is_generated(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:3])
    zero = {"point": "z.1[0]", "op": "scale", "scale": 0, "positions": "5:"}
    records = await steps(
        server,
        session_id,
        "generate",
        max_tokens=4,
        ignore_eos=True,
        points=["z.1"],
        interventions=[zero],
    )
    silent = [not tensor(record, "z.1")[0].any() for record in records]
    assert silent == [False, False, True, True]
    assert all(tensor(record, "z.1")[1].any() for record in records)
    assert (await state(server, session_id))["edits"] == 2


@pytest.mark.parametrize("encoding", ["base64", "float"])
@pytest.mark.parametrize(
    "point",
    ["resid_pre.1", "q.1", "z.1[1]", "pattern.1", "scores.1[0]", "ln_f_scale", "mlp_post.0"],
)
def test_a_captured_tensor_can_be_sent_back_as_it_is(point: str, encoding: str) -> None:
    async def main() -> None:
        async with serving() as server:
            source = await server.open(token_ids=PROMPT[:6])
            body: dict[str, Any] = {
                "token_ids": [11],
                "points": [point],
                "encoding_format": encoding,
            }
            (captured,) = await steps(server, source, **body)
            target = await server.open(token_ids=PROMPT[10:16])
            replace = {
                "point": point,
                "positions": "6",
                "op": "replace",
                "value": captured["points"][point],
            }
            (record,) = await steps(server, target, **body, interventions=[replace])
            assert record["points"] == captured["points"]

    asyncio.run(main())


@served
async def test_a_value_of_another_session_is_the_one_committed_there(server: Serving) -> None:
    source = await server.open(token_ids=PROMPT[:8])
    target = await server.open(token_ids=PROMPT[20:27])
    (original,) = await steps(
        server, source, "fork", at=7, replay=True, points=["resid_pre.1", "q.0"]
    )
    patches = [
        {
            "point": "resid_pre.1",
            "op": "replace",
            "value": {"session": source, "position": 7},
        },
        {
            "point": "k.1",
            "op": "replace",
            "value": {"session": source, "position": 7, "point": "q.0"},
        },
        {"point": "v.1", "op": "replace", "value": {"session": target, "position": 2}},
    ]
    (record,) = await steps(
        server, target, token_ids=[5], points=["resid_pre.1", "k.1"], interventions=patches
    )
    assert_agrees(vector(record, "resid_pre.1"), vector(original, "resid_pre.1"))
    assert_agrees(vector(record, "k.1"), vector(original, "q.0"))
    assert (await state(server, source))["past_length"] == 8


def test_a_value_is_read_while_its_session_is_at_work() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            source, target = await server.open(token_ids=PROMPT), await server.open()
            model.close()
            running = asyncio.create_task(
                server.post(f"/v1/sessions/{source}/generate", max_tokens=50, ignore_eos=True)
            )
            await until_busy(server, source)
            replace = {
                "point": "resid_pre.1",
                "op": "replace",
                "value": {"session": source, "position": 3},
            }
            patching = asyncio.create_task(
                server.post(f"/v1/sessions/{target}/append", token_ids=[1], interventions=[replace])
            )
            model.allow(20)
            answer = await patching
            assert answer.status_code == 200, answer.text
            assert not running.done()
            model.open()
            assert (await running).status_code == 200

    asyncio.run(main())


@served
async def test_a_row_of_the_weights_as_a_value(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:3])
    swap = [
        {"point": "wpe", "op": "replace", "value": {"param": "wpe[0]"}},
        {"point": "wte", "op": "replace", "value": {"param": "wte.weight[318]"}},
        {"point": "ln_f", "op": "add", "value": {"param": "ln_f.bias"}, "scale": -1},
    ]
    (record,) = await steps(
        server, session_id, token_ids=[5], points=["embedding"], interventions=swap
    )
    held = server.service.engine.model.parameters
    row = held["wte.weight"][318] + held["wpe.weight"][0]
    assert vector(record, "embedding").tobytes() == row.numpy().tobytes()


@served
async def test_a_direction_is_taken_out(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:3])
    out = {
        "point": "resid_pre.1",
        "op": "project",
        "value": {"data": [float(x) for x in DIRECTION]},
    }
    (record,) = await steps(
        server, session_id, token_ids=[5], points=["resid_pre.1"], interventions=[out]
    )
    left = vector(record, "resid_pre.1") @ DIRECTION / np.linalg.norm(DIRECTION)
    assert abs(float(left)) < 1e-4
    assert record["edited"][0]["scale"] == 0.0


@served
async def test_masked_keys_get_no_weight(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:5])
    mask = {"point": "scores.0[1]", "keys": "1:3,5:", "op": "mask"}
    (record,) = await steps(
        server, session_id, token_ids=[5], points=["pattern.0"], interventions=[mask]
    )
    pattern = tensor(record, "pattern.0")
    assert (pattern[1] > 0).tolist() == [True, False, False, True, True, False]
    assert (pattern[0] > 0).all()
    assert_agrees(pattern.sum(axis=1), np.ones(2, np.float32))
    assert record["edited"] == [
        {"point": "scores.0[1]", "op": "mask", "scale": None, "keys": "1:3,5:", "sha256": None}
    ]


@served
async def test_what_is_recorded_is_named_at_open(server: Serving) -> None:
    for record, code in ((["resid_post.9"], "unknown_point"), ([5], "invalid_request")):
        answer = await server.post("/v1/sessions", record=record)
        assert (answer.status_code, error_of(answer)["code"]) == (400, code)
        assert error_of(answer)["param"] == "record"
    session_id = await server.open(record=["resid_post.*", "hook_embed"], token_ids=[1])
    child = await fork(server, session_id)
    for one in (session_id, child):
        session = server.service.engine.view(one).session
        assert session.record == ("wte", "resid_post.0", "resid_post.1")

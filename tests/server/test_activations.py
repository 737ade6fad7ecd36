"""Internals of past positions over HTTP: every form, recorded or not, whoever is at work."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from server.negotiation import Form
from server.studies.answers import Activations
from tests.agreement import assert_agrees
from tests.reference import reference_points
from tests.server.decoding import STREAMS, accepting, metadata, told
from tests.server.forking import LIVELY
from tests.server.gating import gated, until_busy, until_idle
from tests.server.serving import Serving, error_of, served, serving

pytestmark = pytest.mark.usefixtures("lively")

IDS = [11, 318, 40, 1549, 6, 11, 262, 9, 50256]
POINTS = "resid_post.1,pattern.0,z.1[0],logits[318,262]"


async def looked_at(server: Serving, session_id: str, **query: Any) -> Any:
    path = f"/v1/sessions/{session_id}/activations"
    answer = await server.client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@served
async def test_each_position_is_what_a_full_pass_has(server: Serving) -> None:
    session_id = await server.open(token_ids=IDS)
    answer = await looked_at(server, session_id, points=POINTS, positions="2,4:6,8")
    Activations.model_validate(answer, strict=True)
    assert (answer["object"], answer["source"]) == ("activations", "rebuilt")
    assert answer["session"]["past_length"] == 9
    assert answer["usage"] == {
        "steps": 0,
        "cached_tokens": 4,
        "rebuilt_tokens": 0,
        "seed": None,
    }
    expected = reference_points(LIVELY, IDS)
    for record, position in zip(answer["records"], (2, 4, 5, 8), strict=True):
        assert (record["position"], record["token"]["id"]) == (position, IDS[position])
    [*_, last] = told(Form.JSON, json.dumps(answer).encode())
    assert_agrees(last.points["resid_post.1"], expected["resid_post.1"][8])
    assert_agrees(last.points["pattern.0"], expected["pattern.0"][8])
    assert_agrees(last.points["z.1[0]"], expected["z.1"][8, :1])
    assert_agrees(last.points["logits[318,262]"], expected["logits"][8, [318, 262]])


@pytest.mark.parametrize("form", STREAMS)
@pytest.mark.parametrize("recorded", [False, True])
def test_streams_say_the_same_as_the_answer(form: Form, recorded: bool) -> None:
    async def main() -> None:
        async with serving() as server:
            more = {"record": ["resid_post.*", "pattern.0", "z.*", "logits"]} if recorded else {}
            session_id = await server.open(token_ids=IDS, **more)
            answer = await looked_at(server, session_id, points=POINTS)
            assert answer["source"] == ("recorded" if recorded else "rebuilt")
            path = f"/v1/sessions/{session_id}/activations?points={POINTS}"
            stream = await server.client.get(path, headers=accepting(form))
            assert stream.headers["content-type"].startswith(form.value)
            *records, done = told(form, stream.content)
            whole = told(Form.JSON, json.dumps(answer).encode())
            assert [one.record for one in records] == [one.record for one in whole]
            for one, other in zip(records, whole, strict=True):
                for name, array in one.points.items():
                    np.testing.assert_allclose(array, other.points[name], rtol=1e-5, atol=1e-6)
            assert done.record["object"] == "done"
            assert done.record["source"] == answer["source"]

    asyncio.run(main())


@served
async def test_one_stacked_answer(server: Serving) -> None:
    session_id = await server.open(token_ids=IDS)
    path = f"/v1/sessions/{session_id}/activations"
    query = {"points": POINTS + ",attn.1", "positions": "1,3:9"}
    answer = await server.client.get(path, params=query, headers=accepting(Form.STACKED))
    assert answer.headers["content-type"] == Form.STACKED.value
    tensors, expected = load(answer.content), reference_points(LIVELY, IDS)
    positions = [1, *range(3, 9)]
    assert tensors["positions"].tolist() == positions
    assert tensors["token_ids"].tolist() == [IDS[p] for p in positions]
    assert tensors["n_keys"].tolist() == [p + 1 for p in positions]
    for name in ("pattern.0", "pattern.1", "resid_post.1"):
        assert_agrees(tensors[name], expected[name][positions], what=name)
    said = json.loads(metadata(answer.content)["answer"])
    assert (said["object"], said["source"]) == ("activations", "rebuilt")
    assert said["aliases"] == {"attn.1": "pattern.1"}
    assert said["session"]["id"] == session_id
    assert "records" not in said


@served
async def test_an_empty_session_has_no_records(server: Serving) -> None:
    session_id = await server.open()
    path = f"/v1/sessions/{session_id}/activations?points=logits"
    for form in (Form.JSON, *STREAMS):
        answer = await server.client.get(path, headers=accepting(form))
        assert answer.status_code == 200
        records = told(form, answer.content)
        assert [one.record["object"] for one in records] == ([] if form is Form.JSON else ["done"])
        last = answer.json() if form is Form.JSON else records[-1].record
        assert last["source"] == "rebuilt"


@served
async def test_an_empty_session_stacked(server: Serving) -> None:
    session_id = await server.open()
    path = f"/v1/sessions/{session_id}/activations?points=pattern.0"
    answer = await server.client.get(path, headers=accepting(Form.STACKED))
    assert {name: len(a) for name, a in load(answer.content).items()} == {
        "positions": 0,
        "token_ids": 0,
    }


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ({"positions": "9"}, "invalid_request", "positions"),
        ({"positions": "3:10"}, "invalid_request", "positions"),
        ({"positions": "5:5"}, "invalid_request", "positions"),
        ({"positions": "-1"}, "invalid_request", "positions"),
        ({"positions": ""}, "invalid_request", "positions"),
        ({"positions": "1:"}, "invalid_request", "positions"),
        ({"positions": "99999999999"}, "invalid_request", "positions"),
        ({"points": "resid_post.2"}, "unknown_point", "points"),
        ({"points": ""}, "unknown_point", "points"),
        ({"points": "logits[50257]"}, "unknown_point", "points"),
        ({"points": "blocks.0.hook_mlp_in"}, "unknown_point", "points"),
        ({"encoding_format": "hex"}, "invalid_request", "encoding_format"),
        ({"point": "wte"}, "invalid_request", "point"),
    ],
)
def test_what_is_not_there_is_refused(query: dict[str, str], code: str, param: str) -> None:
    async def main() -> None:
        async with serving() as server:
            session_id = await server.open(token_ids=IDS)
            path = f"/v1/sessions/{session_id}/activations"
            answer = await server.client.get(path, params=query)
            assert answer.status_code == 400
            assert (error_of(answer)["code"], error_of(answer)["param"]) == (code, param)

    asyncio.run(main())


@pytest.mark.parametrize("record", [[], ["logits"]])
def test_the_size_is_known_before_anything_is_computed(record: list[str]) -> None:
    async def main() -> None:
        async with gated(max_response_bytes=300_000) as (server, model):
            session_id = await server.open(token_ids=IDS, record=record)
            n_passes = model.n_passes
            path = f"/v1/sessions/{session_id}/activations"
            for accept in (Form.JSON, Form.STACKED):
                refused = await server.client.get(
                    path, params={"points": "logits"}, headers=accepting(accept)
                )
                assert refused.status_code == 400
                assert error_of(refused)["code"] == "response_too_large"
                assert error_of(refused)["param"] == "positions"
            assert model.n_passes == n_passes
            allowed = await server.client.get(path, params={"points": "logits", "positions": "3"})
            assert allowed.status_code == 200
            for form in STREAMS:  # bounded by the reader
                stream = await server.client.get(
                    path, params={"points": "logits"}, headers=accepting(form)
                )
                assert len(told(form, stream.content)) == 10
            assert server.service.answers.held_bytes == 0

    asyncio.run(main())


def test_it_sees_the_last_commit_and_waits_for_no_mutation() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=IDS[:4], record=["resid_post.1"])
            model.close()
            path = f"/v1/sessions/{session_id}/append"
            running = asyncio.create_task(server.post(path, token_ids=IDS[4:]))
            await until_busy(server, session_id)
            answer = await looked_at(server, session_id, points="resid_post.1")
            assert answer["source"] == "recorded"
            assert [record["position"] for record in answer["records"]] == [0, 1, 2, 3]
            model.open()
            assert (await running).status_code == 200
            answer = await looked_at(server, session_id, points="resid_post.1")
            assert len(answer["records"]) == 9
            await until_idle(server)

    asyncio.run(main())


@served
async def test_edited_steps_say_what_was_edited(server: Serving) -> None:
    session_id = await server.open(token_ids=IDS[:3])
    edit = {"point": "mlp_out.0", "op": "scale", "scale": 0.5, "positions": "4"}
    path = f"/v1/sessions/{session_id}/append"
    stepped = (await server.post(path, token_ids=IDS[3:], interventions=[edit])).json()
    answer = await looked_at(server, session_id, points="embedding")
    assert [len(record["edited"]) for record in answer["records"]] == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert answer["records"][4]["edited"] == stepped["records"][1]["edited"]


@served
async def test_an_unknown_session_is_not_found(server: Serving) -> None:
    answer = await server.client.get("/v1/sessions/sess_0/activations")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "session_not_found")

"""What holds in every form of an answer: equal numbers, refusals, bounds."""

import asyncio
from typing import Any

import numpy as np
import pytest

from model.points import all_points
from server.negotiation import Form
from tests.server.decoding import STREAMS, Told, accepting, same, told
from tests.server.gating import steps_scope, until_busy
from tests.server.hand import Hand
from tests.server.serving import Serving, error_of, served, serving

FORMS = [Form.JSON, *STREAMS]


async def answer(server: Serving, path: str, form: Form, **body: Any) -> list[Told]:
    """The records, without the terminal one."""
    given = await server.client.post(path, json=body, headers=accepting(form))
    assert given.status_code == 200, given.text
    assert given.headers["content-type"].partition(";")[0] == form.value
    records = told(form, given.content)
    return records[:-1] if form.streams else records


@served
async def test_everything_at_the_last_position_comes_in_every_form(server: Serving) -> None:
    config = server.service.facts.config
    points = all_points(config)
    full = await server.open(token_ids=[7 * i % 50257 for i in range(config.n_ctx - 1)])
    for verb, asked in (
        ("append", {"token_ids": [995]}),
        ("generate", {"max_tokens": 1, "temperature": 0}),
    ):
        read = {}
        for form in FORMS:
            fork = await server.post(f"/v1/sessions/{full}/fork")
            path = f"/v1/sessions/{fork.json()['id']}/{verb}"
            names = [str(point) for point in points]
            (read[form],) = await answer(server, path, form, points=names, **asked)
            assert same([read[form]], [read[Form.JSON]]), (verb, form)
        for point in points:
            array = read[Form.FRAMES].points[str(point)]
            assert array.shape == point.shape(config, config.n_ctx - 1), point
            assert np.isfinite(array).all(), point


@served
async def test_floats_are_the_same_numbers(server: Serving) -> None:
    body = {"token_ids": [1, 2], "points": ["resid_post.*", "scores.0", "lens.1", "ln_f_scale"]}

    async def numbers(form: Form, **more: Any) -> list[dict[str, list[Any]]]:
        path = f"/v1/sessions/{await server.open(token_ids=[3])}/append"
        records = await answer(server, path, form, **body, **more)
        return [{n: a.tolist() for n, a in record.points.items()} for record in records]

    expected = await numbers(Form.FRAMES)
    for form in (Form.JSON, Form.SSE, Form.NDJSON):
        assert await numbers(form, encoding_format="float") == expected


@served
async def test_the_lookup_streams_in_every_form(server: Serving) -> None:
    asked = ["wte", "wpe", "resid_pre.0", "embedding[3,1]"]
    body = {"token_ids": list(range(70)), "past_length": 900, "points": asked}
    plain = await answer(server, "/v1/embed", Form.JSON, **body)
    assert plain[0].points["embedding[3,1]"].tolist() == [
        plain[0].points["resid_pre.0"][unit] for unit in (3, 1)
    ]
    for form in STREAMS:
        assert same(await answer(server, "/v1/embed", form, **body), plain)


@served
async def test_what_has_no_records_is_json_whatever_is_accepted(server: Serving) -> None:
    for form in Form:
        opened = await server.client.post("/v1/sessions", headers=accepting(form))
        assert opened.json()["object"] == "session"
    path = f"/v1/sessions/{opened.json()['id']}/append"
    headers = accepting(Form.STACKED)
    steps = await server.client.post(path, json={"token_ids": [1]}, headers=headers)
    assert steps.json()["object"] == "steps"


@served
async def test_every_form_is_told(server: Serving) -> None:
    formats = (await server.client.get("/v1/capabilities")).json()["formats"]
    assert formats == [form.value for form in Form]
    paths = server.app.openapi()["paths"]
    content = paths["/v1/sessions/{session_id}/append"]["post"]["responses"]["200"]["content"]
    assert set(content) == {form.value for form in FORMS}


REFUSED = [
    ("append", b'{"token_ids": [' + b"1," * 1024 + b"1]}", "context_length_exceeded", "token_ids"),
    ("append", b'{"token_ids": [50257]}', "invalid_request", "token_ids"),
    ("append", b'{"prompt": "a", "points": ["resid"]}', "unknown_point", "points"),
    ("append", b'{"prompt": "a", "past_length": 7}', "past_length_mismatch", "past_length"),
    ("generate", b'{"temperature": 101}', "invalid_request", "temperature"),
    ("generate", b'{"temperature": NaN}', "invalid_request", "temperature"),
    ("generate", b'{"logit_bias": {"1": Infinity}}', "invalid_request", "logit_bias"),
    ("generate", b'{"temperature": 1e999}', "invalid_request", "temperature"),
    ("generate", b'{"max_tokens": 2000}', "context_length_exceeded", "max_tokens"),
]


@served
async def test_s08_n03_bad_input_is_a_real_4xx_in_every_form(server: Serving) -> None:
    session_id = await server.open(token_ids=[1])
    for form in FORMS:
        for verb, content, code, param in REFUSED:
            headers = {**accepting(form), "content-type": "application/json"}
            path = f"/v1/sessions/{session_id}/{verb}"
            refused = await server.client.post(path, content=content, headers=headers)
            assert refused.status_code in (400, 409), (form, content[:40])
            assert refused.headers["content-type"] == "application/json"
            assert (error_of(refused)["code"], error_of(refused)["param"]) == (code, param)
    assert await server.length(session_id) == 1


@served
async def test_frames_have_no_numbers_as_text(server: Serving) -> None:
    session_id = await server.open(token_ids=[1])
    body = {"token_ids": [2], "encoding_format": "float"}
    for path in (f"/v1/sessions/{session_id}/append", "/v1/embed"):
        refused = await server.client.post(path, json=body, headers=accepting(Form.FRAMES))
        assert refused.status_code == 400
        assert error_of(refused)["param"] == "encoding_format"
    assert await server.length(session_id) == 1


@pytest.mark.parametrize("form", STREAMS)
def test_s06_a_reader_that_waits_bounds_what_is_computed_and_gets_all_of_it(form: Form) -> None:
    """A record has 200 KB of logits; the buffer holds five, and one is being written."""

    async def main() -> None:
        async with serving(reply_buffer_bytes=2**20) as server:
            session_id = await server.open(token_ids=[1])
            hand = Hand(write_blocks=True)
            scope = steps_scope(session_id, "generate", accept=form.value)
            hand.feed(b'{"ignore_eos": true, "max_tokens": 30, "points": ["logits"]}')
            request = asyncio.create_task(hand.run(server.app, scope))
            await until_busy(server, session_id)
            await asyncio.sleep(0.3)
            assert await server.length(session_id) < 15
            hand.may_write.set()
            await request
            assert len(told(form, hand.body)) == 31

    asyncio.run(main())

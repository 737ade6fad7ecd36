"""Requests that meet: busy, deleted, drained, stalled, left. The model waits at a gate."""

import asyncio
import json

import pytest

from engine.events import StepRecord
from server.negotiation import Form
from server.wire import Message, Wire
from tests.server.decoding import STREAMS, accepting, told
from tests.server.gating import begin, gated, steps_scope, until_busy, until_idle
from tests.server.hand import http_scope, until


def test_x01_a_second_mutation_is_busy_and_a_read_is_not() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=[1])
            path = f"/v1/sessions/{session_id}"
            model.close()
            first = asyncio.create_task(server.post(f"{path}/append", token_ids=[2]))
            await until_busy(server, session_id)
            for verb, body in (
                ("append", {"token_ids": [3]}),
                ("generate", {}),
                ("truncate", {"to": 0}),
            ):
                second = await server.post(f"{path}/{verb}", **body)
                assert second.status_code == 409
                assert second.json()["error"]["code"] == "session_busy"
                assert second.headers["retry-after"] == "1"
            assert await server.length(session_id) == 1
            assert (await server.client.get(f"{path}/tokens")).status_code == 200
            model.open()
            assert (await first).status_code == 200
            assert await server.length(session_id) == 2

    asyncio.run(main())


@pytest.mark.parametrize("form", STREAMS)
def test_x02_delete_ends_a_running_stream(form: Form) -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=[1])
            model.close()
            scope = steps_scope(session_id, "generate", accept=form.value)
            hand, request = begin(server, scope, max_tokens=100)
            model.allow()
            await until(lambda: hand.body != b"")
            deleted = asyncio.create_task(server.client.delete(f"/v1/sessions/{session_id}"))
            await asyncio.sleep(0.01)
            model.open()
            assert (await deleted).status_code == 200
            await request
            last = told(form, hand.body)[-1].record
            assert last["error"]["code"] == "session_deleted"
            assert (await server.client.get(f"/v1/sessions/{session_id}")).status_code == 404

    asyncio.run(main())


def test_record_n_arrives_before_step_n_plus_1_is_computed() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=[1])
            model.close()
            before = model.n_passes
            scope = steps_scope(session_id, "generate", accept="application/x-ndjson")
            hand, request = begin(server, scope, max_tokens=4)
            for index in range(4):
                model.allow()
                await hand.until_body_has(f'"index":{index}'.encode())
                assert model.n_passes == before + index + 1
            await request
            assert json.loads(hand.body.splitlines()[-1])["object"] == "done"

    asyncio.run(main())


@pytest.mark.parametrize("accept", [*(form.value for form in STREAMS), "*/*"])
def test_s01_s02_a_client_that_leaves_frees_the_session(accept: str) -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=[1, 2])
            model.close()
            hand, request = begin(server, steps_scope(session_id, "generate", accept=accept))
            model.allow(3)
            if accept != "*/*":
                await until(lambda: hand.body != b"")
            await until_busy(server, session_id)
            hand.disconnect()
            await request
            model.open()
            await until_idle(server)
            length = await server.length(session_id)
            assert length < 20
            assert accept != "*/*" or length == 2, "a plain answer is all or nothing"
            path = f"/v1/sessions/{session_id}/append"
            record = (await server.post(path, token_ids=[7], past_length=length)).json()
            assert record["records"][0]["position"] == length

    asyncio.run(main())


def test_an_open_whose_client_leaves_makes_no_session() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            model.close()
            scope = http_scope("POST", "/v1/sessions", headers={"content-type": "application/json"})
            hand, request = begin(server, scope, token_ids=[1] * 600)
            await until(lambda: server.service.engine.stats().running > 0)
            hand.disconnect()
            await request
            model.open()
            await until_idle(server)
            assert (await server.client.get("/v1/sessions")).json()["data"] == []

    asyncio.run(main())


def test_s09_a_fault_in_the_model_is_told_and_undone() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=[1])
            path = f"/v1/sessions/{session_id}/append"
            model.fails = True
            plain = await server.post(path, token_ids=[2])
            assert (plain.status_code, plain.json()["error"]["code"]) == (500, "internal_error")
            for form in STREAMS:
                body, headers = {"token_ids": [2]}, accepting(form)
                streamed = await server.client.post(path, json=body, headers=headers)
                (last,) = told(form, streamed.content)
                assert last.record["error"]["code"] == "internal_error"
                assert last.record["session"]["past_length"] == 1
                assert b"[DONE]" not in streamed.content
            model.fails = False
            assert (await server.post(path, token_ids=[2])).status_code == 200
            assert await server.length(session_id) == 2

    asyncio.run(main())


@pytest.mark.parametrize("form", STREAMS)
def test_s09_a_fault_in_sending_ends_the_work_and_tells_the_true_length(
    monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    record = Wire.record

    def broken(self: Wire, step: StepRecord) -> Message:
        if step.index == 1:
            raise RuntimeError("secret")
        return record(self, step)

    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=[1])
            model.close()
            scope = steps_scope(session_id, "generate", accept=form.value)
            hand, request = begin(server, scope, ignore_eos=True)
            model.allow(2)  # the third pass waits at the gate before it can hear of the fault
            await until(lambda: hand.body != b"")
            await asyncio.sleep(0.05)
            assert not request.done(), "the length is told when it is final"
            model.open()
            await request
            last = told(form, hand.body)[-1].record
            assert last["error"]["code"] == "internal_error"
            assert b"secret" not in hand.body
            assert b"[DONE]" not in hand.body
            length = await server.length(session_id)
            assert 3 <= last["session"]["past_length"] == length < 20

    monkeypatch.setattr(Wire, "record", broken)
    asyncio.run(main())


def test_x05_equal_request_ids_at_once_are_no_conflict() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            ids = [await server.open(token_ids=[1]) for _ in range(2)]
            model.close()
            running = [
                asyncio.create_task(
                    server.client.post(
                        f"/v1/sessions/{session_id}/append",
                        json={"token_ids": [7 + n]},
                        headers={"x-request-id": "same"},
                    )
                )
                for n, session_id in enumerate(ids)
            ]
            for session_id in ids:
                await until_busy(server, session_id)
            model.open()
            answers = await asyncio.gather(*running)
            assert [a.json()["records"][0]["token"]["id"] for a in answers] == [7, 8]
            assert [a.headers["x-request-id"] for a in answers] == ["same", "same"]

    asyncio.run(main())


def test_a_full_queue_and_too_many_sessions_are_429() -> None:
    async def main() -> None:
        async with gated(max_queue=1, max_sessions=2) as (server, model):
            ids = [await server.open(token_ids=[1]) for _ in range(2)]
            third = await server.post("/v1/sessions")
            assert third.json()["error"]["code"] == "too_many_sessions"
            assert third.json()["error"]["max_sessions"] == 2
            model.close()
            first = asyncio.create_task(server.post(f"/v1/sessions/{ids[0]}/append", token_ids=[2]))
            await until_busy(server, ids[0])
            full = await server.post(f"/v1/sessions/{ids[1]}/append", token_ids=[2])
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert full.headers["retry-after"]
            model.open()
            assert (await first).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("form", STREAMS)
def test_s11_draining_ends_streams_and_refuses_work(form: Form) -> None:
    async def main() -> None:
        async with gated(grace_seconds=0.2) as (server, model):
            session_id = await server.open(token_ids=[1])
            idle_id = await server.open(token_ids=[1])
            model.close()
            scope = steps_scope(session_id, "generate", accept=form.value)
            hand, request = begin(server, scope)
            model.allow()
            await until(lambda: hand.body != b"")
            drain = asyncio.create_task(server.host.drain())
            await asyncio.sleep(0)
            for path in ("/ready", f"/v1/sessions/{idle_id}/generate", "/v1/sessions"):
                verb = "GET" if path == "/ready" else "POST"
                answer = await server.client.request(verb, path)
                assert answer.status_code == 503, path
                assert answer.json()["error"]["code"] == "shutting_down"
                assert answer.headers["retry-after"]
            assert (await server.client.get("/health")).status_code == 200
            await asyncio.sleep(0.3)
            model.open()
            await drain
            await request
            last = told(form, hand.body)[-1].record
            assert last["error"]["code"] == "shutting_down"
            assert last["session"]["past_length"] == await server.length(session_id)

    asyncio.run(main())


def test_s05_health_answers_while_large_texts_and_prefills_run() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open()
            path = f"/v1/sessions/{session_id}/append"
            model.close()
            prefill = asyncio.create_task(server.post(path, token_ids=[1] * 1024, points=[]))
            text = asyncio.create_task(server.post("/tokenize", prompt="a" * 131_072))  # T05
            await until_busy(server, session_id)
            assert (await server.client.get("/health")).status_code == 200
            assert not prefill.done()
            model.open()
            assert (await prefill).status_code == 200
            assert (await text).json()["count"] > 0

    asyncio.run(main())


@pytest.mark.parametrize("accept", [*(form.value for form in STREAMS), "*/*"])
def test_m01_no_room_is_a_503_before_the_first_byte(accept: str) -> None:
    """The budget holds one full session, and another one is at work in it."""

    async def main() -> None:
        async with gated(kv_budget="720KiB") as (server, model):
            working, waiting = await server.open(), await server.open()
            model.close()
            path = f"/v1/sessions/{working}/append"
            first = asyncio.create_task(server.post(path, token_ids=[1] * 1024, points=[]))
            await until_busy(server, working)
            refused = asyncio.create_task(
                server.client.post(
                    f"/v1/sessions/{waiting}/append",
                    json={"token_ids": [1] * 1024},
                    headers={"accept": accept},
                )
            )
            await until_busy(server, waiting)
            model.allow()
            answer = await refused
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_room")
            assert answer.headers["retry-after"]
            assert await server.length(waiting) == 0
            model.open()
            assert (await first).status_code == 200
            path = f"/v1/sessions/{waiting}/append"
            assert (await server.post(path, token_ids=[1])).status_code == 200

    asyncio.run(main())

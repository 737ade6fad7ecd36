"""Work without a session: bounded in bytes, off the event loop, the same whoever else asks."""

import asyncio
import threading
from typing import Any

import pytest

from server.host import ANSWERS_AT_ONCE
from tests.server.hand import Hand, http_scope, until
from tests.server.serving import Serving, error_of, served, serving, vector

ASKED: dict[str, dict[str, Any]] = {
    "/v1/embed": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@served
async def test_answers_in_flight_share_a_budget(server: Serving) -> None:
    budget = server.service.answers
    assert budget.max_bytes == ANSWERS_AT_ONCE * server.service.settings.max_response_bytes
    with budget.lease(budget.max_bytes):
        for path, body in ASKED.items():
            for stream in {False, path == "/v1/embed"}:
                answer = await server.post(path, **body, **({"stream": True} if stream else {}))
                assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
                assert error_of(answer)["max_bytes"] == budget.max_bytes
                assert answer.headers["retry-after"]
    for path, body in ASKED.items():
        assert (await server.post(path, **body)).status_code == 200
    assert budget.held_bytes == 0


@served
async def test_an_answer_is_held_until_it_is_sent(server: Serving) -> None:
    budget, hand = server.service.answers, Hand(write_blocks=True)
    hand.feed(b'{"token_ids": [1, 2]}')
    scope = http_scope("POST", "/v1/embed", headers={"content-type": "application/json"})
    request = asyncio.create_task(hand.run(server.app, scope))
    await until(lambda: budget.held_bytes > 0)
    await asyncio.sleep(0.01)
    assert budget.held_bytes > 0
    hand.may_write.set()
    await request
    assert len(hand.body) > 0
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/detokenize", {"tokens": [15496] * 2000}, "decode"),
        ("/tokenize", {"prompt": "a " * 1000, "return_token_strs": True}, "piece"),
    ],
)
def test_s05_heavy_work_leaves_the_event_loop(
    path: str, body: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving() as server:
            tokenizer = server.service.engine.tokenizer
            real, threads = getattr(tokenizer, method), set[threading.Thread]()

            def watched(given: Any) -> Any:
                threads.add(threading.current_thread())
                return real(given)

            monkeypatch.setattr(tokenizer, method, watched)
            assert (await server.post(path, **body)).status_code == 200
            assert threads
            assert threading.current_thread() not in threads

    asyncio.run(main())


def test_a_text_is_an_answer_too_and_not_larger_than_one() -> None:
    async def main() -> None:
        async with serving(max_response_bytes=1000) as server:
            assert (await server.post("/detokenize", tokens=[15496] * 190)).status_code == 200
            refused = await server.post("/detokenize", tokens=[15496] * 300)
            assert (refused.status_code, error_of(refused)["code"]) == (400, "response_too_large")
            assert error_of(refused)["param"] == "tokens"
            assert error_of(refused)["n_bytes"] == len('{"prompt":""}') + 5 * 300
            assert error_of(refused)["max_bytes"] == 1000

    asyncio.run(main())


@served
async def test_p07_the_first_token_is_at_position_0_beside_any_mate(server: Serving) -> None:
    alone = await server.post("/v1/embed", prompt="I went to the")
    answers = await asyncio.gather(
        server.post("/v1/embed", token_ids=list(range(200))),
        server.post("/v1/embed", prompt="I went to the"),
        server.post("/v1/embed", token_ids=[5] * 200, past_length=800),
    )
    assert answers[1].json() == alone.json()
    tables = server.service.engine.model.tables
    for answer, start in zip(answers, (0, 0, 800), strict=True):
        for t, record in enumerate(answer.json()["records"]):
            row = tables.wte[record["token"]["id"]] + tables.wpe[start + t]
            assert record["position"] == start + t
            assert vector(record, "embedding").tobytes() == row.numpy().tobytes()


@served
async def test_b08_equal_bytes_at_any_parallelism(server: Serving) -> None:
    body = {"prompt": "the same text", "points": ["wte", "wpe", "embedding"]}
    alone = (await server.post("/v1/embed", **body)).content
    for n in range(1, 9):
        answers = await asyncio.gather(*(server.post("/v1/embed", **body) for _ in range(n)))
        assert {answer.content for answer in answers} == {alone}


@served
async def test_b09_records_are_in_order_whatever_the_form_of_input(server: Serving) -> None:
    as_text = (await server.post("/v1/embed", prompt="Hello world")).json()
    as_ids = (await server.post("/v1/embed", token_ids=[15496, 995])).json()
    assert as_text == as_ids
    many = (await server.post("/v1/embed", token_ids=list(range(1024)))).json()["records"]
    assert [record["index"] for record in many] == list(range(1024))
    assert [record["token"]["id"] for record in many] == list(range(1024))
    for nested in ([[15496]], [[15496], [995]], ["Hello"]):
        refused = await server.post("/v1/embed", token_ids=nested)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "token_ids")


@served
async def test_an_answer_of_steps_is_held_until_it_is_sent(server: Serving) -> None:
    """Finished work leaves the queue; what its reader has not taken still counts."""
    budget, hand = server.service.answers, Hand(write_blocks=True)
    session_id = await server.open()
    hand.feed(b'{"token_ids": [1, 2], "points": ["logits"]}')
    path = f"/v1/sessions/{session_id}/append"
    scope = http_scope("POST", path, headers={"content-type": "application/json"})
    request = asyncio.create_task(hand.run(server.app, scope))
    await until(lambda: server.service.engine.view(session_id).session.past_length == 2)
    held = budget.held_bytes
    assert held > 2 * 50257 * 4
    with budget.lease(budget.max_bytes - held):
        answer = await server.post(path, token_ids=[3])
        assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
    assert await server.length(session_id) == 2
    hand.may_write.set()
    await request
    assert budget.held_bytes == 0

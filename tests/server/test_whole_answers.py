import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import pytest

from embedding.tokenizer import Tokenizer
from engine.events import StepRecord
from model.config import SIZES
from server.negotiation import Form
from server.streaming import WholeAnswer, steps_json
from server.wire import Wire
from tests.server.hand import Hand, http_scope
from tests.server.serving import facts_about


def record(index: int) -> StepRecord:
    return StepRecord(index=index, position=index, token_id=index, text="x")


def answer(
    work: Callable[[], Coroutine[Any, Any, bytes]], status: int = 200, form: Form = Form.JSON
) -> WholeAnswer:
    async def parts() -> list[bytes]:
        return [await work()]

    return WholeAnswer(parts, life=nullcontext(), write_timeout=20, status=status, form=form)


@pytest.mark.parametrize("form", [Form.JSON, Form.STACKED])
def test_an_answer_is_whole(form: Form) -> None:
    async def work() -> bytes:
        return b"x" * 1_000_000

    async def main() -> Hand:
        hand = Hand()
        await hand.run(answer(work, status=201, form=form), http_scope())
        return hand

    hand = asyncio.run(main())
    assert hand.status == 201
    assert hand.headers["content-type"] == form.value
    assert hand.headers["content-length"] == "1000000"
    assert hand.body == b"x" * 1_000_000
    assert len(hand.sent) > 3


def test_the_end_of_an_answer_is_not_taken_for_a_client_that_left() -> None:
    """uvicorn's `receive` says disconnect when the response is complete, too."""
    aborted = []

    async def work() -> bytes:
        return b"x"

    async def main() -> None:
        abort = {"stepscope.abort": {"abort": lambda: aborted.append(True)}}
        scope = http_scope(extensions=abort)
        for _ in range(20):
            await Hand().run(answer(work), scope)

    asyncio.run(main())
    assert not aborted


def endless() -> tuple[Hand, asyncio.Task[None], asyncio.Event]:
    """An answer that is never done, its request, and what is set once its work has ended."""
    hand, ended = Hand(), asyncio.Event()

    async def work() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    return hand, asyncio.create_task(hand.run(answer(work), http_scope())), ended


def test_s02_a_plain_answer_is_cancelled_when_its_client_leaves() -> None:
    async def main() -> Hand:
        hand, request, ended = endless()
        hand.disconnect()
        await request
        assert ended.is_set()
        return hand

    assert asyncio.run(main()).sent == []


def test_an_outer_cancellation_is_no_disconnect() -> None:
    async def main() -> None:
        _, request, ended = endless()
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert ended.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("n_records", [0, 1, 3])
@pytest.mark.parametrize("tail", [{}, {"usage": {"steps": 3}}])
@pytest.mark.parametrize("bytes_per_record", [600, 200_000])
def test_steps_json_is_json(
    tokenizer: Tokenizer, n_records: int, tail: dict[str, Any], bytes_per_record: int
) -> None:
    facts = facts_about(SIZES["tiny"])
    parts = asyncio.run(
        steps_json(
            {"object": "steps"},
            [record(i) for i in range(n_records)],
            tail,
            wire=Wire(tokenizer, facts),
            encoding="base64",
            bytes_per_record=bytes_per_record,
        )
    )
    whole = json.loads(b"".join(parts))
    assert whole["object"] == "steps"
    assert [r["index"] for r in whole["records"]] == list(range(n_records))
    assert set(whole) == {"object", "records", *tail}

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from embedding.tokenizer import Tokenizer
from engine.errors import NoRoom
from engine.events import StepRecord
from model.config import SIZES
from server.errors import row_of
from server.negotiation import Form
from server.streaming import Batch, Ending, JsonAnswer, Pace, RecordStream, Source, steps_json
from server.wire import Wire
from tests.server.hand import Hand, http_scope, sse
from tests.server.serving import facts_about

DONE = Ending({"object": "done"})
FAILED = Ending({"error": {"code": "internal_error"}, "session": {"past_length": 7}}, failed=True)


def record(index: int, text: str = "x") -> StepRecord:
    return StepRecord(index=index, position=index, token_id=index, text=text)


class Work:
    """A source whose pieces are put in by hand."""

    def __init__(self, *pieces: Batch | Ending | Exception) -> None:
        self.pieces: asyncio.Queue[Batch | Ending | Exception] = asyncio.Queue()
        for piece in pieces:
            self.pieces.put_nowait(piece)
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.refusal: Exception | None = None
        self.left = asyncio.Event()

    @property
    def source(self) -> Source:
        return Source(started=self._started, pieces=self._pieces, failed=self._failed)

    async def _started(self) -> None:
        await self.may_start.wait()
        if self.refusal is not None:
            raise self.refusal

    async def _pieces(self) -> AsyncGenerator[Batch | Ending, None]:
        while True:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def _failed(self, error: Exception) -> Mapping[str, Any]:
        assert not self.left.is_set()
        return {"error": {"code": row_of(error).code}, "session": {"past_length": 7}}

    @property
    def life(self) -> AbstractContextManager[None]:
        return self._lifetime()

    @contextmanager
    def _lifetime(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.left.set()


@pytest.fixture
def stream(tokenizer: Tokenizer) -> Callable[..., RecordStream]:
    facts = facts_about(SIZES["tiny"])

    def make(work: Work, form: Form = Form.SSE, **pace: Any) -> RecordStream:
        times = {"write_timeout": 20.0, "ping_seconds": 20.0, "bytes_per_record": 600} | pace
        return RecordStream(
            work.source,
            form=form,
            wire=Wire(tokenizer, facts),
            encoding="float",
            pace=Pace(**times),
            life=work.life,
        )

    return make


def answer(work: Callable[[], Coroutine[Any, Any, bytes]], status: int = 200) -> JsonAnswer:
    async def parts() -> list[bytes]:
        return [await work()]

    return JsonAnswer(parts, life=nullcontext(), write_timeout=20, status=status)


def test_sse_has_data_lines_then_done_then_done_marker(
    stream: Callable[..., RecordStream],
) -> None:
    async def main() -> Hand:
        hand = Hand()
        work = Work(Batch([record(0)]), Batch([record(1), record(2)]), DONE)
        await hand.run(stream(work), http_scope())
        return hand

    hand = asyncio.run(main())
    *records, done, marker = sse(hand.body)
    assert [json.loads(payload)["index"] for payload in records] == [0, 1, 2]
    assert json.loads(done) == {"object": "done"}
    assert marker == "[DONE]"
    assert hand.complete
    assert hand.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert hand.headers["cache-control"] == "no-store"
    assert hand.headers["x-accel-buffering"] == "no"
    assert "content-length" not in hand.headers


def test_s13_ndjson_is_one_json_per_line(stream: Callable[..., RecordStream]) -> None:
    async def main() -> Hand:
        hand = Hand()
        work = Work(Batch([record(0, "\r\n\u2028\u0085\0")]), DONE)
        await hand.run(stream(work, Form.NDJSON), http_scope())
        return hand

    hand = asyncio.run(main())
    first, last = hand.body.decode().splitlines()
    assert json.loads(first)["text"] == "\r\n\u2028\u0085\0"
    assert json.loads(last) == {"object": "done"}
    assert hand.headers["content-type"] == "application/x-ndjson"


@pytest.mark.parametrize("form", [Form.SSE, Form.NDJSON])
@pytest.mark.parametrize("n_records", [0, 1])
@pytest.mark.parametrize("fault", [FAILED, RuntimeError("secret")])
def test_s09_a_fault_is_one_error_record_and_no_done_marker(
    stream: Callable[..., RecordStream], form: Form, n_records: int, fault: Ending | Exception
) -> None:
    async def main() -> Hand:
        hand = Hand()
        batches = [Batch([record(0)])] * n_records
        await hand.run(stream(Work(*batches, fault), form), http_scope())
        return hand

    hand = asyncio.run(main())
    payloads = sse(hand.body) if form is Form.SSE else hand.body.decode().splitlines()
    assert len(payloads) == n_records + 1
    assert json.loads(payloads[-1])["error"]["code"] == "internal_error"
    assert json.loads(payloads[-1])["session"] == {"past_length": 7}
    assert b"[DONE]" not in hand.body
    assert b"secret" not in hand.body
    assert hand.complete


def test_s12_headers_come_with_the_start_and_each_record_at_once(
    stream: Callable[..., RecordStream],
) -> None:
    async def main() -> None:
        hand, work = Hand(), Work()
        work.may_start.clear()
        request = asyncio.create_task(hand.run(stream(work), http_scope()))
        await asyncio.sleep(0)
        assert hand.sent == []
        work.may_start.set()
        work.pieces.put_nowait(Batch([record(0)]))
        await hand.until_body_has(b'"index":0')
        assert hand.status == 200
        assert not hand.complete
        work.pieces.put_nowait(DONE)
        await request

    asyncio.run(main())


def test_s08_a_refusal_before_the_start_sends_nothing(
    stream: Callable[..., RecordStream],
) -> None:
    async def main() -> Hand:
        hand, work = Hand(), Work()
        work.refusal = NoRoom(needed_bytes=1, total_bytes=1)
        with pytest.raises(NoRoom):
            await hand.run(stream(work), http_scope())
        assert work.left.is_set()
        return hand

    assert asyncio.run(main()).sent == []


@pytest.mark.parametrize("when", ["before the start", "between records"])
def test_s04_a_client_that_leaves_ends_the_work(
    stream: Callable[..., RecordStream], when: str
) -> None:
    async def main() -> None:
        hand, work = Hand(), Work(Batch([record(0)]))
        if when == "before the start":
            work.may_start.clear()
        request = asyncio.create_task(hand.run(stream(work), http_scope()))
        if when == "between records":
            await hand.until_body_has(b'"index":0')
        assert not work.left.is_set()
        hand.disconnect()
        await request
        assert work.left.is_set()
        assert not hand.complete

    asyncio.run(main())


def test_s06_a_client_that_does_not_read_is_given_up(
    stream: Callable[..., RecordStream],
) -> None:
    aborted = []

    async def main() -> None:
        hand, work = Hand(write_blocks=True), Work(Batch([record(0)]))
        abort = {"stepscope.abort": {"abort": lambda: aborted.append(True)}}
        scope = http_scope(extensions=abort)
        await hand.run(stream(work, write_timeout=0.01), scope)
        assert work.left.is_set()

    asyncio.run(main())
    assert aborted


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_holds_its_life_until_its_last_byte_is_sent(
    stream: Callable[..., RecordStream], streams: bool
) -> None:
    async def body() -> list[bytes]:
        return [b"x"]

    async def main() -> None:
        hand, work = Hand(write_blocks=True), Work(Batch([record(0)]), DONE)
        plain = JsonAnswer(body, life=work.life, write_timeout=20)
        app = stream(work) if streams else plain
        request = asyncio.create_task(hand.run(app, http_scope()))
        await asyncio.sleep(0.01)
        assert not work.left.is_set()
        hand.may_write.set()
        await request
        assert hand.complete
        assert work.left.is_set()

    asyncio.run(main())


def test_a_silent_sse_stream_is_pinged_and_ndjson_is_not(
    stream: Callable[..., RecordStream],
) -> None:
    async def main(form: Form) -> Hand:
        hand, work = Hand(), Work(Batch([record(0)]))
        app = stream(work, form, ping_seconds=0.005)
        request = asyncio.create_task(hand.run(app, http_scope()))
        if form is Form.SSE:
            await hand.until_body_has(b": ping\n\n: ping\n\n")
        else:
            await hand.until_body_has(b'"index":0')
            await asyncio.sleep(0.05)
        work.pieces.put_nowait(DONE)
        await request
        return hand

    pinged = asyncio.run(main(Form.SSE))
    assert json.loads(sse(pinged.body)[0])["index"] == 0
    assert b"ping" not in asyncio.run(main(Form.NDJSON)).body


@pytest.mark.parametrize("bytes_per_record", [600, 40_000, 200_000])
def test_records_are_written_in_bounded_pieces_in_order(
    stream: Callable[..., RecordStream], bytes_per_record: int
) -> None:
    async def main() -> Hand:
        hand = Hand()
        work = Work(Batch([record(i) for i in range(300)]), DONE)
        await hand.run(stream(work, bytes_per_record=bytes_per_record), http_scope())
        return hand

    hand = asyncio.run(main())
    payloads = [json.loads(payload) for payload in sse(hand.body)[:-1]]
    assert [payload["index"] for payload in payloads[:-1]] == list(range(300))
    n_writes = sum(m["type"] == "http.response.body" for m in hand.sent)
    assert n_writes >= min(300, 300 * bytes_per_record // (64 * 1024))


def test_json_answer_is_whole() -> None:
    async def work() -> bytes:
        return b"x" * 1_000_000

    async def main() -> Hand:
        hand = Hand()
        await hand.run(answer(work, status=201), http_scope())
        return hand

    hand = asyncio.run(main())
    assert hand.status == 201
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


def test_s02_a_plain_answer_is_cancelled_when_its_client_leaves() -> None:
    async def main() -> Hand:
        hand, ended = Hand(), asyncio.Event()

        async def work() -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        request = asyncio.create_task(hand.run(answer(work), http_scope()))
        hand.disconnect()
        await request
        assert ended.is_set()
        return hand

    assert asyncio.run(main()).sent == []


def test_an_outer_cancellation_is_no_disconnect() -> None:
    async def main() -> None:
        hand, ended = Hand(), asyncio.Event()

        async def work() -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        request = asyncio.create_task(hand.run(answer(work), http_scope()))
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
    told = json.loads(b"".join(parts))
    assert told["object"] == "steps"
    assert [r["index"] for r in told["records"]] == list(range(n_records))
    assert set(told) == {"object", "records", *tail}

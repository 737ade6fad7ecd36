import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest

from embedding.tokenizer import Tokenizer
from engine.errors import NoRoom
from engine.events import StepRecord
from model.config import SIZES
from server.errors import row_of
from server.negotiation import Form
from server.streaming import Batch, Ending, Pace, RecordStream, Source, WholeAnswer
from server.wire import Message, Tensor, Wire
from tests.server.decoding import STREAMS, told
from tests.server.hand import Hand, http_scope, sse, until
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
        times = {"write_timeout": 20.0, "ping_seconds": 20.0, "largest_record": 600} | pace
        return RecordStream(
            work.source,
            form=form,
            wire=Wire(tokenizer, facts),
            encoding="base64",
            pace=Pace(**times),
            life=work.life,
        )

    return make


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


@pytest.mark.parametrize("form", STREAMS)
def test_s13_text_comes_back_exactly(stream: Callable[..., RecordStream], form: Form) -> None:
    async def main() -> Hand:
        hand = Hand()
        work = Work(Batch([record(0, '\r\n\u2028\u0085\0"\\')]), DONE)
        await hand.run(stream(work, form), http_scope())
        return hand

    hand = asyncio.run(main())
    first, last = told(form, hand.body)
    assert first.record["text"] == '\r\n\u2028\u0085\0"\\'
    assert last.record == {"object": "done"}
    assert hand.headers["content-type"].partition(";")[0] == form.value
    assert hand.headers["cache-control"] == "no-store"
    if form is not Form.FRAMES:
        assert len(hand.body.decode().splitlines()) == {Form.NDJSON: 2, Form.SSE: 6}[form]


@pytest.mark.parametrize("form", STREAMS)
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
    *records, last = told(form, hand.body)
    assert len(records) == n_records
    assert last.record["error"]["code"] == "internal_error"
    assert last.record["session"] == {"past_length": 7}
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


@pytest.mark.parametrize("form", STREAMS)
def test_s06_a_client_that_does_not_read_is_given_up(
    stream: Callable[..., RecordStream], form: Form
) -> None:
    aborted = []

    async def main() -> None:
        hand, work = Hand(write_blocks=True), Work(Batch([record(0)]))
        abort = {"stepscope.abort": {"abort": lambda: aborted.append(True)}}
        scope = http_scope(extensions=abort)
        await hand.run(stream(work, form, write_timeout=0.01), scope)
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
        plain = WholeAnswer(body, life=work.life, write_timeout=20)
        app = stream(work) if streams else plain
        request = asyncio.create_task(hand.run(app, http_scope()))
        await asyncio.sleep(0.01)
        assert not work.left.is_set()
        hand.may_write.set()
        await request
        assert hand.complete
        assert work.left.is_set()

    asyncio.run(main())


def test_a_silent_sse_stream_is_pinged_and_no_other_is(
    stream: Callable[..., RecordStream],
) -> None:
    async def main(form: Form) -> Hand:
        hand, work = Hand(), Work(Batch([record(0)]))
        app = stream(work, form, ping_seconds=0.005)
        request = asyncio.create_task(hand.run(app, http_scope()))
        if form is Form.SSE:
            await hand.until_body_has(b": ping\n\n: ping\n\n")
        else:
            await until(lambda: bool(hand.body))
            await asyncio.sleep(0.05)
        work.pieces.put_nowait(DONE)
        await request
        return hand

    pinged = asyncio.run(main(Form.SSE))
    assert json.loads(sse(pinged.body)[0])["index"] == 0
    for form in (Form.NDJSON, Form.FRAMES):
        assert b"ping" not in asyncio.run(main(form)).body


def test_a_large_record_is_written_in_slices_without_a_ping_in_it(
    stream: Callable[..., RecordStream],
) -> None:
    """Each slice has the write timeout to itself, so that a slow reader is not given up."""

    async def main() -> Hand:
        hand = Hand()
        work = Work(Batch([record(0, "x" * 2_000_000)]), DONE)
        await hand.run(stream(work, ping_seconds=0.0001), http_scope())
        return hand

    hand = asyncio.run(main())
    assert max(len(message.get("body", b"")) for message in hand.sent) <= 256 * 1024
    one = b'"text":"' + b"x" * 2_000_000 + b'"'
    assert one in hand.body


@pytest.mark.parametrize("form", STREAMS)
def test_what_is_no_step_streams_too(stream: Callable[..., RecordStream], form: Form) -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)

    async def main() -> Hand:
        hand = Hand()
        grid = Message({"object": "grid"}, {"a": Tensor(numbers, ("x", "y"))})
        await hand.run(
            stream(Work(Batch([Message({"object": "progress"}), grid]), DONE), form), http_scope()
        )
        return hand

    progress, grid, done = told(form, asyncio.run(main()).body)
    assert [one.record["object"] for one in (progress, grid, done)] == ["progress", "grid", "done"]
    assert progress.points == {}
    assert grid.points["a"].tolist() == numbers.tolist()


@pytest.mark.parametrize("largest_record", [600, 40_000, 200_000])
def test_records_are_written_in_bounded_pieces_in_order(
    stream: Callable[..., RecordStream], largest_record: int
) -> None:
    async def main() -> Hand:
        hand = Hand()
        work = Work(Batch([record(i) for i in range(300)]), DONE)
        await hand.run(stream(work, largest_record=largest_record), http_scope())
        return hand

    hand = asyncio.run(main())
    payloads = [json.loads(payload) for payload in sse(hand.body)[:-1]]
    assert [payload["index"] for payload in payloads[:-1]] == list(range(300))
    n_writes = sum(m["type"] == "http.response.body" for m in hand.sent)
    assert n_writes >= min(300, 300 * largest_record // (64 * 1024))

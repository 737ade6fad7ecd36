"""Answers: a whole one, or a stream of records as SSE, NDJSON or frames. The event loop.

Own ASGI responses, because frameworks cancel neither plain answers nor silent streams when the
client leaves. Every request ends in exactly one terminal record:

    record*  done  [DONE]      SSE; the others without [DONE]
    record*  error             a fault after the first byte; no [DONE]

Before the first byte a fault is a real HTTP status. SSE has only `data:` lines and `: ping`
comments, since clients break on others. https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.events import StepRecord
from server.connection import ClientGone, Connection
from server.framing import framing_of
from server.negotiation import EncodingFormat, Form
from server.wire import Message, Wire, dumps

WRITE_BYTES = 64 * 1024
"""About what is encoded and written at once; more is encoded on a worker thread."""

R = TypeVar("R")

_log = structlog.get_logger("stepscope.stream")


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that may be sent now: steps, or what else a route tells."""

    records: Sequence[StepRecord | Message]


@dataclass(frozen=True, slots=True)
class Ending:
    """The terminal record; `failed` where it is an error."""

    record: Mapping[str, Any]
    failed: bool = False


async def _nothing() -> None:
    """There is nothing left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a stream's records come from.

    `started` returns when work begins, or raises what becomes an HTTP status. Asking `pieces` for
    more says that the piece before was written. `failed` ends the work after a fault in sending it
    and returns the terminal record, which tells where that left the session. `close` ends what is
    left of it, wherever the client left.
    """

    started: Callable[[], Awaitable[None]]
    pieces: Callable[[], AsyncGenerator[Batch | Ending, None]]
    failed: Callable[[Exception], Awaitable[Mapping[str, Any]]]
    close: Callable[[], Awaitable[None]] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A stream's times, in seconds, and about how many bytes its largest record has."""

    write_timeout: float
    ping_seconds: float
    largest_record: int


class _Owned(Response):
    """A response that sends itself, and ends its work when the client leaves.

    `life` is what it holds from its first moment until its last byte was sent, or never will be.
    """

    def __init__(
        self,
        *,
        status: int,
        media_type: str,
        headers: Mapping[str, str],
        write_timeout: float,
        life: AbstractContextManager[object],
    ) -> None:
        super().__init__(status_code=status, media_type=media_type, headers=headers)
        del self.headers["content-length"]  # not known yet
        self._write_timeout = write_timeout
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless the client leaves first."""
        connection = Connection(scope, receive, send, write_timeout=self._write_timeout)
        with self._life, suppress(ClientGone):
            await connection.unless_gone(self._run(connection))

    async def _run(self, connection: Connection) -> None:
        raise NotImplementedError


class RecordStream(_Owned):
    """A stream of records."""

    def __init__(
        self,
        source: Source,
        *,
        form: Form,
        wire: Wire,
        encoding: EncodingFormat,
        pace: Pace,
        life: AbstractContextManager[object],
        status: int = 200,
    ) -> None:
        super().__init__(
            status=status,
            media_type=form.value,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            write_timeout=pace.write_timeout,
            life=life,
        )
        self._source = source
        self._framing = framing_of(form, encoding)
        self._wire = wire
        self._pace = pace

    async def _run(self, connection: Connection) -> None:
        try:
            await self._source.started()
            await connection.start(self.status_code, self.raw_headers)
            async with self._pinging(connection):
                await self._send_pieces(connection)
        finally:
            await self._source.close()
        await connection.end()

    async def _send_pieces(self, connection: Connection) -> None:
        try:
            async with aclosing(self._source.pieces()) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Ending):
                        await connection.write(self._last_frames(piece))
                        return
                    await self._send_records(connection, piece.records)
        except ClientGone:
            raise
        except Exception as error:  # too late for a status: it becomes the terminal record
            _log.exception("stream_failed")
            ending = Ending(await self._source.failed(error), failed=True)
            await connection.write(self._last_frames(ending))

    async def _send_records(
        self, connection: Connection, records: Sequence[StepRecord | Message]
    ) -> None:
        heavy = self._pace.largest_record > WRITE_BYTES
        for group in _groups(records, WRITE_BYTES // self._pace.largest_record):
            encode = partial(self._encoded, group)
            await connection.write(await asyncio.to_thread(encode) if heavy else encode())

    def _encoded(self, records: Sequence[StepRecord | Message]) -> bytes:
        return b"".join(self._framing.encode(self._message(record)) for record in records)

    def _message(self, record: StepRecord | Message) -> Message:
        return record if isinstance(record, Message) else self._wire.record(record)

    def _last_frames(self, ending: Ending) -> bytes:
        frame = self._framing.encode(Message(ending.record))
        return frame if ending.failed else frame + self._framing.last

    def _pinging(self, connection: Connection) -> AbstractAsyncContextManager[None]:
        if not self._framing.ping:
            return nullcontext()
        return _beside(connection.ping_when_silent(self._framing.ping, self._pace.ping_seconds))


class WholeAnswer(_Owned):
    """What a coroutine makes, in parts; it is cancelled if the client leaves first."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, Sequence[bytes]]],
        *,
        write_timeout: float,
        life: AbstractContextManager[object],
        form: Form = Form.JSON,
        status: int = 200,
    ) -> None:
        super().__init__(
            status=status,
            media_type=form.value,
            headers={"cache-control": "no-store"},
            write_timeout=write_timeout,
            life=life,
        )
        self._work = work

    async def _run(self, connection: Connection) -> None:
        parts = await self._work()
        self.headers["content-length"] = str(sum(map(len, parts)))
        await connection.start(self.status_code, self.raw_headers)
        await connection.write_all(parts)


def grouped(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts that are worth a write each."""
    group: list[bytes] = []
    n_bytes = 0
    for part in parts:
        group.append(part)
        n_bytes += len(part)
        if n_bytes >= WRITE_BYTES:
            yield b"".join(group)
            group, n_bytes = [], 0
    yield b"".join(group)


async def steps_json(
    head: Mapping[str, Any],
    records: Sequence[StepRecord],
    tail: Mapping[str, Any],
    *,
    wire: Wire,
    encoding: EncodingFormat,
    bytes_per_record: int,
) -> list[bytes]:
    """The parts of `{...head, "records": [...], ...tail}`; many are made on a worker thread.

    Record by record, because one call of orjson keeps every other thread from the interpreter. In
    parts, because joining them would hold the whole answer twice.
    """

    def work() -> list[bytes]:
        parts = []
        before = dumps(head)[:-1] + b',"records":['
        for group in _groups(records, WRITE_BYTES // bytes_per_record):
            encoded = (wire.record(record).json(encoding) for record in group)
            parts.append(before + b",".join(encoded))
            before = b","
        after = b"]," + dumps(tail)[1:] if tail else b"]}"
        return [*parts, after] if parts else [before + after]

    heavy = len(records) * bytes_per_record > WRITE_BYTES
    return await asyncio.to_thread(work) if heavy else work()


def _groups(records: Sequence[R], size: int) -> Iterator[Sequence[R]]:
    size = max(1, size)
    return (records[at : at + size] for at in range(0, len(records), size))


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` in the background of the block; it ends with the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, ClientGone):
            await task

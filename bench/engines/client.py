"""A client that costs little: HTTP/1.1 over plain sockets. It counts records and parses none.

A TCP connection per stream. The server writes whole records, large ones in parts, so the mark near
the beginning of a record is never cut.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

_BUFFER_BYTES = 2**20


class Form(NamedTuple):
    """A way to stream records: what to ask for, and what each record has once."""

    media_type: str
    mark: bytes


FORMS = {
    "sse": Form("text/event-stream", b'data: {"object":"step"'),
    "frames": Form("application/x-safetensors-stream", rb"{\"object\":\"step\""),
}


@asynccontextmanager
async def connected(port: int) -> AsyncIterator["Client"]:
    """A connection to a server on this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_BUFFER_BYTES)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


class Client:
    """One connection; a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def created(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a POST has made."""
        self._post(path, body, "application/json")
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        content = await self._reader.readexactly(length)
        assert b" 201 " in head.partition(b"\r\n")[0], content
        answer: dict[str, Any] = json.loads(content)
        return answer

    async def n_streamed(self, path: str, body: dict[str, Any], form: Form) -> int:
        """How many records a POST streams."""
        self._post(path, body, form.media_type)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0], head
        return sum([part.count(form.mark) async for part in self._parts()])

    def _post(self, path: str, body: dict[str, Any], accept: str) -> None:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\naccept: {accept}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)

    async def _parts(self) -> AsyncIterator[bytes]:
        """The parts of a chunked body, each with the end of its line."""
        while n_bytes := int(await self._reader.readline(), 16):
            yield await self._reader.readexactly(n_bytes + 2)
        await self._reader.readline()

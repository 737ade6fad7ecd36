"""One response's way out: notices a client that leaves, bounds each write. The event loop.

It alone calls `receive()` once the body was read: a second listener would miss the disconnect,
which is told only once (brockamer/findajob #743).
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

ABORT = "stepscope.abort"
"""Scope extension: the transport's abort, where the server offers it (`server.protocol`)."""

_SLICE = 256 * 1024

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection, or refused to read for too long."""


class Connection:
    """Sends one response. After `ClientGone` nothing more is to be sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, write_timeout: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._write_timeout = write_timeout
        self._work: asyncio.Task[object] | None = None
        self._last_write = 0.0
        self._writing = False
        self._ended = False
        self.gone = False

    async def unless_gone(self, work: Coroutine[object, object, T]) -> T:
        """Run `work`, and cancel it if the client leaves.

        Raises:
            ClientGone: the client left first.
        """
        task = asyncio.create_task(work)
        self._work = task
        watcher = asyncio.create_task(self._watch())
        try:
            return await task
        except asyncio.CancelledError:
            if self.gone:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the status line and the headers."""
        await self._send_bounded(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    async def write(self, body: bytes) -> None:
        """Send some of the body. Returns once the client is not too far behind.

        In slices, so that one that reads slowly is told from one that does not read.

        Raises:
            ClientGone: it left, or did not read for the write timeout.
        """
        for at in range(0, len(body), _SLICE):
            part = body[at : at + _SLICE]
            message = {"type": "http.response.body", "body": part, "more_body": True}
            await self._send_bounded(message)

    async def write_all(self, parts: Iterable[bytes]) -> None:
        """Send a whole body."""
        for part in parts:
            await self.write(part)
        await self.end()

    async def end(self) -> None:
        """Say that the body is complete."""
        self._ended = True
        await self._send_bounded({"type": "http.response.body", "body": b"", "more_body": False})

    async def ping_when_silent(self, ping: bytes, seconds: float) -> None:
        """Write `ping` whenever nothing was written for `seconds`. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(seconds - (loop.time() - self._last_write), 0.001))
            if not self._writing and loop.time() - self._last_write >= seconds:
                await self.write(ping)

    async def _send_bounded(self, message: Message) -> None:
        if self.gone:
            raise ClientGone
        self._writing = True
        try:
            await send_bounded(self._scope, self._send, message, seconds=self._write_timeout)
        except ClientGone:
            self._leave()
            raise
        finally:
            self._writing = False
            self._last_write = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:  # servers tell the end of a response in the same way
            self._leave()

    def _leave(self) -> None:
        """Stop working for the client."""
        self.gone = True
        if self._work is not None:
            self._work.cancel()


async def send_bounded(scope: Scope, send: Send, message: Message, *, seconds: float) -> None:
    """Send one message.

    Raises:
        ClientGone: it left, or did not read for `seconds`; what it has not read is dropped, since
            closing would wait until it does.
    """
    try:
        async with asyncio.timeout(seconds):
            await send(message)
    except (TimeoutError, OSError):
        abort = scope.get("extensions", {}).get(ABORT, {}).get("abort")
        if abort is not None:
            abort()
        raise ClientGone from None

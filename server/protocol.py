"""uvicorn's HTTP protocol and what it lacks: a deadline for requests, a bound of heads, `abort`.

The keep-alive timeout does not cover a request that is being received, so a client that sends one
byte now and then would hold its connection for ever (Kludex/uvicorn #157). And closing the
transport of a client that does not read waits until it does; only aborting frees it. The parser
keeps a head of any size. Event loop.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.connection import ABORT

MAX_HEAD_BYTES = 64 * 1024
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"


def protocol_with_deadline(read_timeout: float) -> type[HttpToolsProtocol]:
    """A protocol class whose requests must be there whole within `read_timeout` seconds."""

    class DeadlineProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _head_bytes: int | None = 0  # of a request line and headers that are not whole yet

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._head_bytes is not None:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._head_bytes = None
            super().on_headers_complete()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope.setdefault("extensions", {})[ABORT] = {"abort": self.transport.abort}
            self._arm()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._head_bytes = 0
            self._disarm()

        def _arm(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(read_timeout, self.transport.abort)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return DeadlineProtocol

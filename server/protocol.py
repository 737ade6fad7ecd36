"""uvicorn's HTTP protocol with two things more: a deadline for requests to arrive, and `abort`.

The keep-alive timeout does not cover a request that is being received, so a client that sends one
byte now and then would hold its connection for ever (Kludex/uvicorn #157). And closing the
transport of a client that does not read waits until it does; only aborting frees it. Event loop.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.connection import ABORT


def protocol_with_deadline(read_timeout: float) -> type[HttpToolsProtocol]:
    """A protocol class whose requests must be there whole within `read_timeout` seconds."""

    class DeadlineProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            extensions: dict[str, dict[object, object]] = {ABORT: {"abort": self.transport.abort}}
            self.scope["extensions"] = extensions
            self._arm()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._disarm()

        def _arm(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(read_timeout, self.transport.abort)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return DeadlineProtocol

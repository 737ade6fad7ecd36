"""The way back from the model thread to one request on the event loop.

Written by the log thread through the loop, read by the request's own task. The model thread sees
two numbers: how many bytes of records it produced, and how many the reader has taken. Their
difference is the backlog, and a row whose backlog is too large is not scheduled.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType

from engine.errors import Cancelled
from engine.events import Done, Event, Failed, Progress, Started


class Reply:
    """An async iterator over one request's events, for one reader.

    Iterating never raises: a request that ended badly yields `Failed` last. Asking for the next
    event says that the one before it was written to the client.
    """

    def __init__(self, *, on_cancel: Callable[["Reply"], None], wake: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._wake = wake
        self._events: asyncio.Queue[tuple[Event, int]] = asyncio.Queue()
        self._being_written = 0
        self._finished = False
        self.produced_bytes = 0  # the model thread's
        self.consumed_bytes = 0  # the event loop's

    @property
    def backlog_bytes(self) -> int:
        """Bytes of records that were produced and not yet written. Any thread."""
        return self.produced_bytes - self.consumed_bytes

    def room(self, weights: Iterable[int], buffer_bytes: int) -> int:
        """How many of the next records, by their bytes, the reader has room for. The model thread.

        All that a buffer holds or none; one with nothing to read has room for one at least.
        """
        n = total = 0
        for n_bytes in weights:
            if n and total + n_bytes > buffer_bytes:
                break
            n, total = n + 1, total + n_bytes
        backlog = self.backlog_bytes
        return 0 if backlog and backlog + total > buffer_bytes else n

    @property
    def finished(self) -> bool:
        """Whether the terminal event was put in."""
        return self._finished

    def put(self, event: Event, n_bytes: int) -> None:
        """Hand one event over. The event loop."""
        self._finished = isinstance(event, Done | Failed)
        self._events.put_nowait((event, n_bytes))

    def cancel(self) -> None:
        """Say that nobody reads any more. Work stops within a step; repeating it is harmless."""
        if not self._finished:
            self._on_cancel(self)

    async def started(self) -> None:
        """Wait until the request has its room.

        Raises:
            EngineError: it was refused or ended before its first step.
        """
        event, _ = await self._events.get()
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Started)

    async def result(self) -> Done:
        """The terminal event of an atomic request.

        Raises:
            EngineError: the request ended badly.
        """
        async for event in self:
            if isinstance(event, Done):
                return event
            if isinstance(event, Failed):
                raise event.error
        raise Cancelled

    def __aiter__(self) -> "Reply":
        return self

    async def __anext__(self) -> Progress | Done | Failed:
        self._written()
        if self._finished and self._events.empty():
            raise StopAsyncIteration
        event, self._being_written = await self._events.get()
        if isinstance(event, Started):
            return await self.__anext__()
        return event

    def _written(self) -> None:
        if self._being_written:
            self.consumed_bytes += self._being_written
            self._being_written = 0
            self._wake()

    async def __aenter__(self) -> "Reply":
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

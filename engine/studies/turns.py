"""Who of the cells of all studies is in the engine. The event loop.

A study is one request to the queue, however many cells it has. Its cells share a number of turns
with those of all other studies, first come first served, so that steps that somebody waits for do
not stand behind whole grids. A cell that the cache has no room for waits until another one has
ended: none of them is refused while there is one that makes room.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from engine.errors import NoRoom, QueueFull

T = TypeVar("T")
Attempt = Callable[[], Coroutine[Any, Any, T]]

AT_ONCE = 32
_WOKEN = 2
"""Cells that try again when one has ended: if they need less than it did, there are more now."""


class Turns:
    """The turns of one engine. `n_studies` are under way."""

    def __init__(self, n_at_once: int = AT_ONCE) -> None:
        self.n_studies = 0
        self._free = asyncio.Semaphore(n_at_once)
        self._n_inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def study(self) -> Iterator[None]:
        """Count one study."""
        self.n_studies += 1
        try:
            yield
        finally:
            self.n_studies -= 1

    async def take(self, attempt: Attempt[T]) -> T:
        """What `attempt` returns, in a turn of its own.

        Raises:
            QueueFull, NoRoom: there is no place for it, and no cell that could make one.
        """
        async with self._free:
            try:
                while True:
                    self._n_inside += 1
                    try:
                        return await attempt()
                    except (QueueFull, NoRoom):
                        if self._n_inside == 1:
                            raise
                    finally:
                        self._n_inside -= 1
                    await self._until_one_ended()
            finally:
                self._wake()

    async def _until_one_ended(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        n_woken = 0
        while self._waiting and n_woken < _WOKEN:
            waiting = self._waiting.popleft()
            if not waiting.done():  # cancelled
                waiting.set_result(None)
                n_woken += 1

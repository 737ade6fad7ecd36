"""Several requests of the engine as one piece of work. The event loop; numbers on workers.

Two streams are read in step; many requests run a bounded number at a time. Whatever leaves early
cancels what it began, and nothing of it is kept.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from engine.commands import Probe, Read
from engine.events import Done, Failed, StepRecord, Usage
from engine.reply import Reply
from engine.studies.rows import Records
from engine.studies.turns import AT_ONCE, Attempt, Turns

T = TypeVar("T")
Pairs = Sequence[tuple[StepRecord, StepRecord]]

WINDOW = AT_ONCE
"""Cells of one study that run, wait, or have results that nobody took yet."""
_INLINE_BYTES = 256 * 1024


class Probing(Protocol):
    """What a study needs of an engine."""

    @property
    def turns(self) -> Turns:
        """Those of the cells of all studies."""
        ...

    def read(self, command: Read) -> Reply:
        """Internals of committed positions."""
        ...

    def probe(self, command: Probe) -> Reply:
        """Steps that nobody keeps."""
        ...


class Stream:
    """One reply's records, batch by batch. `usage` is there once they have ended."""

    def __init__(self, reply: Reply) -> None:
        self.usage = Usage()
        self._reply = reply

    async def next(self) -> Records:
        """Some more records; none: they have ended.

        Raises:
            EngineError: the request ended badly.
        """
        async for event in self._reply:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                self.usage = event.usage
            if event.records:
                return event.records
        return ()


async def gather(reply: Reply, take: Callable[[Records], None]) -> Usage:
    """Give `take` all records of a reply, which ends with this, batch by batch."""
    async with reply:
        stream = Stream(reply)
        while records := await stream.next():
            await _off_loop(partial(take, records), n_bytes=_bytes_of(records))
    return stream.usage


async def in_step(
    engine: Probing, a: Read, b: Read, take: Callable[[Pairs], None]
) -> tuple[Usage, Usage]:
    """Give `take` the records of two reads of the same positions, if any, in pairs, as both come.

    What one of them is ahead waits in its own reply, whose backlog keeps it from being scheduled.

    Raises:
        EngineError, SessionError: one of them was refused or failed; the other one is cancelled.
    """
    if not a.capture.positions:
        return Usage(), Usage()
    async with engine.read(a) as left, engine.read(b) as right:
        streams = Stream(left), Stream(right)
        waiting = deque[StepRecord](), deque[StepRecord]()
        while pairs := await _next_pairs(streams, waiting):
            n_bytes = 2 * _bytes_of(record for record, _ in pairs)
            await _off_loop(partial(take, pairs), n_bytes=n_bytes)
    return streams[0].usage, streams[1].usage


async def _next_pairs(
    streams: Iterable[Stream], waiting: tuple[deque[StepRecord], deque[StepRecord]]
) -> Pairs:
    for stream, records in zip(streams, waiting, strict=True):
        if not records:
            records.extend(await stream.next())
    n_pairs = min(map(len, waiting))
    return [(waiting[0].popleft(), waiting[1].popleft()) for _ in range(n_pairs)]


async def _off_loop(work: Callable[[], None], *, n_bytes: int) -> None:
    """Do work on `n_bytes` of numbers: on a worker thread where they are many."""
    if n_bytes > _INLINE_BYTES:
        await asyncio.to_thread(work)
    else:
        work()


def _bytes_of(records: Iterable[StepRecord]) -> int:
    return sum(array.nbytes for record in records for array in record.points.values())


async def in_order(
    attempts: Iterable[Attempt[T]], turns: Turns, *, window: int = WINDOW
) -> AsyncGenerator[T, None]:
    """What `attempts` return, in their order; at most `window` of them run or wait to be taken.

    Raises:
        QueueFull, NoRoom: there is no place for one, and no other cell that could make one.
    """
    tasks = deque[asyncio.Task[T]]()
    with turns.study():
        try:
            for attempt in attempts:
                if len(tasks) == window:
                    yield await tasks[0]
                    tasks.popleft()
                tasks.append(asyncio.create_task(turns.take(attempt)))
            while tasks:
                yield await tasks[0]
                tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

"""The log's own thread: what an iteration did is kept, then told.

The model thread submits one batch per iteration and goes on; before the next one it settles this
one, so the model is at most one iteration ahead of the log. Events are released to the
event loop when `commit` returned, all of a batch in one call. If it fails, every request of the
batch is told so, and the model thread learns which ones to drop.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from engine.errors import StepFailed
from engine.events import Event, Failed
from engine.reply import Reply
from sessions.log import Entry, SessionLog
from sessions.session import Session

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one request, and its weight in the reader's buffer.

    `before` is the session as the log had it before this batch; None: it had none. `logged`: the
    event tells of what the log must have kept, as all do but those of passing work.
    """

    reply: Reply
    event: Event
    before: Session | None
    n_bytes: int = 0
    logged: bool = True


@dataclass(slots=True)
class Batch:
    """What one iteration wants kept, and what is to be told once it is."""

    entries: list[Entry] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)


class LogWriter:
    """Keeps batches in order, on one thread, and releases their events."""

    def __init__(self, log: SessionLog, deliver: Callable[[Sequence[Delivery]], None]) -> None:
        self._log = log
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="session-log")
        self._pending: tuple[Batch, Future[bool]] | None = None

    def submit(self, batch: Batch) -> None:
        """Keep `batch`, in the background. The one before must be settled."""
        assert self._pending is None, "settle first"
        if batch.entries or batch.deliveries:
            self._pending = batch, self._pool.submit(self._keep, batch)

    def settle(self) -> Batch:
        """Wait for what was submitted; returns what could not be kept of it."""
        if self._pending is None:
            return Batch()
        batch, kept = self._pending
        self._pending = None
        return Batch() if kept.result() else batch

    def close(self) -> None:
        """Keep what is pending, then stop the thread."""
        self._pool.shutdown(wait=True)

    def _keep(self, batch: Batch) -> bool:
        try:
            if batch.entries:
                self._log.commit(batch.entries)
        except Exception:
            logger.exception("session log failed", entries=len(batch.entries))
            self._deliver([_lost(d) if d.logged else d for d in batch.deliveries])
            return False
        self._deliver(batch.deliveries)
        return True


def _lost(delivery: Delivery) -> Delivery:
    error = StepFailed("the session log could not keep this step")
    return Delivery(delivery.reply, Failed(error, delivery.before), delivery.before)

"""What the event loop tells the model thread: typed messages, read between iterations.

Pure Python; no torch.
"""

import threading
from collections import deque
from dataclasses import dataclass

from engine.job import Job
from engine.reply import Reply
from sessions.session import Session


@dataclass(frozen=True, slots=True)
class RunJob:
    """Step an admitted request."""

    job: Job


@dataclass(frozen=True, slots=True)
class OpenIdle:
    """A new session with nothing to step: empty, or a fork."""

    session: Session
    reply: Reply


@dataclass(frozen=True, slots=True)
class TruncateTo:
    """Roll a session that is not at work back to its first `to` tokens."""

    session: Session
    to: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class ForgetSession:
    """Delete a session, at work or not. `reply` is None where nobody asked: it expired."""

    session: Session
    reply: Reply | None = None


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Nobody reads this reply any more."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class EndAll:
    """End every job now: the grace period is over."""


Message = RunJob | OpenIdle | TruncateTo | ForgetSession | CancelRequest | EndAll


class Inbox:
    """Messages in order, and a bell that wakes the thread that waits for them."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._bell = threading.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Any thread."""
        self._messages.append(message)
        self._bell.set()

    def ring(self) -> None:
        """Wake the reader: something it looks at has changed. Any thread."""
        self._bell.set()

    def take(self) -> list[Message]:
        """All messages so far. The model thread."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self, seconds: float) -> None:
        """Sleep until the bell rings, `seconds` at most, or not at all if it rang since last time.

        Cleared here and nowhere else: a bell that rings during a pass starts another one.
        """
        self._bell.wait(seconds)
        self._bell.clear()

"""The durable record of what sessions committed, and its in-memory form. Pure Python.

A log keeps ids, edits and sampling state and never K/V, which can be rebuilt from them. The log's
own thread calls `commit`, once per iteration with the changes of all rows; what a change reports is
released to clients when the call returns. One conformance suite runs over every back end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sessions.edits import StepEdits
from sessions.errors import LengthOutOfRange, LogError
from sessions.session import Session


@dataclass(frozen=True, slots=True)
class Opened:
    """A new session, with whatever it was opened with."""

    session: Session


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens stepped at `past_length`, `past_length + 1`, ..."""

    session_id: str
    past_length: int  # before these tokens
    token_ids: tuple[int, ...]
    edits: Mapping[int, StepEdits] = field(default_factory=dict)  # by position


@dataclass(frozen=True, slots=True)
class Truncated:
    """A session rolled back to its first `to` tokens."""

    session_id: str
    to: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """A session that is gone, by request or by expiry."""

    session_id: str


Entry = Opened | Committed | Truncated | Deleted


class SessionLog(Protocol):
    """What keeps sessions."""

    def commit(self, batch: Sequence[Entry]) -> None:
        """Keep all of a batch, in its order, or nothing of it.

        Raises:
            LogError: an entry does not fit what was kept before it, or the log is closed or failed.
        """
        ...

    def load(self) -> list[Session]:
        """The sessions that were opened and not deleted, oldest first, as last committed.

        Raises:
            LogError: the log is closed, or what it holds cannot be read.
        """
        ...

    def close(self) -> None:
        """End the log; calling it again does nothing."""
        ...


class MemoryLog:
    """A log that lasts as long as the process."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._closed = False

    def commit(self, batch: Sequence[Entry]) -> None:
        """Keep all of a batch or nothing. Raises LogError."""
        self._check_open()
        sessions = dict(self._sessions)  # the whole change becomes visible by one assignment
        for entry in batch:
            apply(entry, sessions)
        self._sessions = sessions

    def load(self) -> list[Session]:
        """The sessions kept, oldest first. Raises LogError."""
        self._check_open()
        return list(self._sessions.values())

    def close(self) -> None:
        """End the log."""
        self._closed = True
        self._sessions = {}

    def _check_open(self) -> None:
        if self._closed:
            raise LogError("the session log is closed")


def apply(entry: Entry, sessions: dict[str, Session]) -> None:
    """Make one entry's change in `sessions`, which a log replays in order.

    Raises:
        LogError: the entry does not fit; `sessions` is unchanged.
    """
    match entry:
        case Opened(session):
            if session.id in sessions:
                raise LogError(f"session {session.id!r} was opened before")
            sessions[session.id] = session
        case Committed(session_id, past_length, token_ids, edits):
            session = _known(session_id, sessions)
            if past_length != session.past_length:
                raise LogError(
                    f"session {session_id!r} has {session.past_length} tokens, "
                    f"and a commit follows {past_length}"
                )
            sessions[session_id] = session.committed(token_ids, edits)
        case Truncated(session_id, to):
            sessions[session_id] = _truncated(_known(session_id, sessions), to)
        case Deleted(session_id):
            del sessions[_known(session_id, sessions).id]


def _known(session_id: str, sessions: dict[str, Session]) -> Session:
    try:
        return sessions[session_id]
    except KeyError:
        raise LogError(f"the log has no session {session_id!r}") from None


def _truncated(session: Session, to: int) -> Session:
    try:
        return session.truncated(to)
    except LengthOutOfRange as error:
        raise LogError(f"session {session.id!r}: {error}") from error

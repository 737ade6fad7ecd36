"""What the session side can refuse. Pure Python; no torch.

SessionError
├── SessionNotFound      never existed, was deleted, or is another owner's
├── SessionExpired       idle for longer than its time to live; told while the tombstone lasts
├── TooManySessions      the registry is full
├── LengthOutOfRange     a truncate to a length that the session never had
└── LogError             the session log could not keep a change
"""


class SessionError(Exception):
    """Root of this package's errors."""


class SessionNotFound(SessionError):
    """No such session for this owner."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"no session {session_id!r}")


class SessionExpired(SessionError):
    """The session was idle for longer than its time to live."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"session {session_id!r} expired")


class TooManySessions(SessionError):
    """As many sessions are open as the server allows."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        super().__init__(f"{max_sessions} sessions are open, which is the limit")


class LengthOutOfRange(SessionError):
    """A length that is negative or beyond the committed one."""

    def __init__(self, *, to: int, past_length: int) -> None:
        self.to = to
        self.past_length = past_length
        super().__init__(f"length {to} is not within 0..{past_length}, the session's past_length")


class LogError(SessionError):
    """The log refused or failed to keep a batch."""

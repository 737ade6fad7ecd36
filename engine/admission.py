"""What may begin now, in the order in which the API promises its checks. The event loop.

Every check here needs no compute and is made at once, against what was last published: a session
that is free has exactly that length, because one mutation runs at a time and each ends with its
commit being published. Only room in the K/V budget is the model thread's to grant.
"""

from embedding.positions import positions_for
from engine.commands import Append, Capture, Generate, ReplyLimit
from engine.errors import (
    BosNotAtStart,
    EmptySession,
    EngineDown,
    PastLengthMismatch,
    PositionsOutOfRange,
    QueueFull,
    SessionBusy,
    ShuttingDown,
)
from engine.requests import Requests
from sessions.registry import Registry
from sessions.session import Session


class Admission:
    """Checks against the sessions and requests of one engine. `n_ctx` positions to a session."""

    def __init__(
        self, registry: Registry, requests: Requests, *, max_queue: int, n_ctx: int
    ) -> None:
        self.draining = False  # no new work is taken
        self._registry = registry
        self._requests = requests
        self._max_queue = max_queue
        self._n_ctx = n_ctx

    def check_alive(self) -> None:
        """Raises EngineDown."""
        if self._requests.over:
            raise EngineDown

    def check_open(self) -> None:
        """Raises EngineDown, ShuttingDown."""
        self.check_alive()
        if self.draining:
            raise ShuttingDown

    def check_queue(self) -> None:
        """Raises QueueFull."""
        if len(self._requests) >= self._max_queue:
            raise QueueFull(self._max_queue)

    def free(self, session_id: str, owner: str = "", *, past_length: int | None = None) -> Session:
        """The session, if a mutation of it could begin now, at the length that is expected.

        Raises:
            EngineDown, ShuttingDown, SessionError, SessionBusy, PastLengthMismatch: why not.
        """
        self.check_open()
        session = self._registry.find(session_id, owner)
        if self._registry.is_busy(session_id):
            raise SessionBusy(session_id)
        _check_length(session, past_length)
        return session

    def branch(
        self,
        session_id: str,
        owner: str = "",
        *,
        at: int | None = None,
        past_length: int | None = None,
    ) -> Session:
        """The beginning that a fork would have: the session's first `at` tokens, or all.

        Raises:
            EngineDown, ShuttingDown, SessionError, PastLengthMismatch: why it could not be made.
        """
        self.check_open()
        session = self._registry.find(session_id, owner)
        _check_length(session, past_length)
        return session if at is None else session.truncated(at)

    def check_new(self, past_length: int, n_new: int) -> None:
        """See that a session of `past_length` tokens can be made and step `n_new` more.

        Raises:
            PositionOverflow, QueueFull: it cannot.
        """
        positions_for(past_length, n_new, self._n_ctx)
        self.check_queue()

    def append(self, command: Append, n_new: int) -> Session:
        """The session, if it may step `n_new` given tokens now.

        Raises:
            Refused, SessionError, PositionOverflow: why not.
        """
        session = self.free(command.session_id, command.owner, past_length=command.past_length)
        if command.prepend_bos and session.past_length:
            raise BosNotAtStart(session.past_length)
        self._check_steps(session, n_new, command.capture, command.reply_limit)
        return session

    def generate(self, command: Generate) -> tuple[Session, int]:
        """The session and the most tokens it may sample, if it may do so now.

        Raises:
            Refused, SessionError, PositionOverflow: why not.
        """
        session = self.free(command.session_id, command.owner, past_length=command.past_length)
        if not session.past_length:
            raise EmptySession
        remaining = self._n_ctx - session.past_length
        n_new = max(1, remaining) if command.max_tokens is None else command.max_tokens
        self._check_steps(session, n_new, command.capture, command.reply_limit)
        return session, n_new

    def _check_steps(
        self, session: Session, n_new: int, capture: Capture, limit: ReplyLimit | None
    ) -> None:
        positions = positions_for(session.past_length, n_new, self._n_ctx)
        for position in sorted(capture.positions or ()):
            if position not in positions:
                raise PositionsOutOfRange(
                    position=position, past_length=session.past_length, n_new=n_new
                )
        self.check_queue()
        if limit is not None:
            n_full = n_new if capture.positions is None else len(capture.positions)
            limit.take(n_records=n_new, n_full=n_full)


def _check_length(session: Session, expected: int | None) -> None:
    if expected is not None and expected != session.past_length:
        raise PastLengthMismatch(expected=expected, past_length=session.past_length)

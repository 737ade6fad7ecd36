"""What may begin now, in the order in which the API promises its checks. The event loop.

Every check here needs no compute and is made at once, against what was last published: a session
that is free has exactly that length, because one mutation runs at a time and each ends with its
commit being published. Only room in the K/V budget is the model thread's to grant.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from embedding.positions import positions_for
from engine.branches import Branch, branch_of
from engine.commands import Append, Fork, Generate, Probe, Read
from engine.errors import (
    BosNotAtStart,
    EditOutOfReach,
    EmptySession,
    EngineDown,
    PastLengthMismatch,
    PositionCommitted,
    PositionsOutOfRange,
    QueueFull,
    SessionBusy,
    ShuttingDown,
    TooManyEdits,
)
from engine.limits import Limits
from engine.requests import Requests
from sessions.edits import Intervention, edits_at
from sessions.registry import Registry
from sessions.session import Session


class Admission:
    """Checks against the sessions and requests of one engine. `n_ctx` positions to a session."""

    def __init__(
        self, registry: Registry, requests: Requests, limits: Limits, *, n_ctx: int
    ) -> None:
        self.draining = False  # no new work is taken
        self._registry = registry
        self._requests = requests
        self._max_queue = limits.max_queue
        self._max_edit_bytes = limits.edit_bytes
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
        stop: int | None = None,
        replay: bool = False,
        past_length: int | None = None,
    ) -> Branch:
        """What a fork or a probe would have of a session, whatever that is doing.

        It steps the session's tokens up to `stop` again; `replay`: all of them.

        Raises:
            EngineDown, ShuttingDown, SessionError, PastLengthMismatch: why it could not be made.
        """
        self.check_open()
        session = self._registry.find(session_id, owner)
        _check_length(session, past_length)
        return branch_of(session, at, stop=session.past_length if replay else stop)

    def fork(self, command: Fork) -> Branch:
        """The branch that a fork begins with, if it may step what it adds.

        Raises:
            Refused, SessionError, PositionOverflow: why not.
        """
        branch = self.branch(
            command.session_id,
            command.owner,
            at=command.at,
            replay=command.replay,
            past_length=command.past_length,
        )
        n_new = len(branch.tail) + len(command.token_ids)
        self._check_steps(branch.begin, n_new, command)
        return branch

    def read(self, command: Read) -> Session:
        """The session, if what is asked of it is there.

        Raises:
            Refused, SessionError: why not.
        """
        session = self.branch(
            command.session_id, command.owner, past_length=command.past_length
        ).begin
        self._check_steps(replace(session, token_ids=()), session.past_length, command)
        return session

    def probe(self, command: Probe) -> Branch:
        """The branch that a probe begins with, if it may step what it asks for.

        Raises:
            Refused, SessionError, PositionOverflow: why not.
        """
        if command.session_id is None:
            self.check_open()
            branch = Branch(begin=Session(id="", created=0, ttl_seconds=1, owner=command.owner))
        else:
            branch = self.branch(
                command.session_id, command.owner, at=command.at, stop=command.stop
            )
        self._check_steps(branch.begin, len(branch.tail) + len(command.token_ids), command)
        return branch

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
        self._check_steps(session, n_new, command)
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
        self._check_steps(session, n_new, command)
        return session, n_new

    def _check_steps(
        self, session: Session, n_new: int, command: Append | Generate | Fork | Read | Probe
    ) -> None:
        positions = positions_for(session.past_length, n_new, self._n_ctx)
        asked = command.capture.positions
        for position in sorted(asked or ()):
            if position not in positions:
                raise PositionsOutOfRange(
                    position=position, past_length=session.past_length, n_new=n_new
                )
        if not isinstance(command, Read):
            self._check_edits(positions, command.interventions)
        self.check_queue()
        if command.reply_limit is not None:
            n_full = n_new if asked is None else len(asked)
            n_records = n_full if isinstance(command, Read | Probe) else n_new
            command.reply_limit.take(n_records=n_records, n_full=n_full)

    def _check_edits(self, positions: range, interventions: Sequence[Intervention]) -> None:
        """See that what is edited is stepped by this request, and that its history may be kept."""
        if not interventions:
            return
        for first, stop in chain.from_iterable(one.spans or () for one in interventions):
            _check_reach(positions, first)
            if stop is not None:
                _check_reach(positions, stop - 1)
        n_bytes = self._registry.edit_bytes + sum(
            edit.n_bytes for position in positions for edit in edits_at(interventions, position)
        )
        if n_bytes > self._max_edit_bytes:
            raise TooManyEdits(n_bytes=n_bytes, max_bytes=self._max_edit_bytes)


def _check_reach(positions: range, position: int) -> None:
    if position < positions.start:
        raise PositionCommitted(position=position, past_length=positions.start)
    if position >= positions.stop:
        raise EditOutOfReach(position=position, past_length=positions.start, n_new=len(positions))


def _check_length(session: Session, expected: int | None) -> None:
    if expected is not None and expected != session.past_length:
        raise PastLengthMismatch(expected=expected, past_length=session.past_length)

"""What may begin now, in the order in which the API promises its checks. The event loop.

Every check here needs no compute and is made at once, against what was last published: a session
that is free has exactly that length, because one mutation runs at a time and each ends with its
commit being published. Only room in the K/V budget is the model thread's to grant.
"""

from collections.abc import Sequence, Set
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
from engine.studies.turns import Turns
from sessions.edits import STEP_BYTES, Intervention
from sessions.registry import Registry
from sessions.session import Session


class Admission:
    """Checks against the sessions and requests of one engine. `n_ctx` positions to a session."""

    def __init__(
        self,
        registry: Registry,
        requests: Requests,
        turns: Turns,
        limits: Limits,
        *,
        n_ctx: int,
    ) -> None:
        self.draining = False  # no new work is taken
        self._registry = registry
        self._requests = requests
        self._turns = turns
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
        """Raises QueueFull. A study counts as one request, whatever it has in the engine."""
        if self._requests.n_queued + self._turns.n_studies >= self._max_queue:
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
        self._check_steps(branch.positions(command.token_ids), command)
        return branch

    def read(self, command: Read) -> Session:
        """The session, if what is asked of it is there.

        Raises:
            Refused, SessionError: why not.
        """
        session = self.branch(
            command.session_id, command.owner, past_length=command.past_length
        ).begin
        self._check_looks(range(session.past_length), command)
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
        positions = branch.positions(command.token_ids)
        positions_for(positions.start, len(positions), self._n_ctx)
        check_reach(positions, command.interventions)
        self._check_looks(positions, command)
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
        self._check_steps(range(session.past_length, session.past_length + n_new), command)
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
        self._check_steps(range(session.past_length, session.past_length + n_new), command)
        return session, n_new

    def _check_steps(self, positions: range, command: Append | Generate | Fork) -> None:
        """See that a session may step these, and keep and tell what comes of it."""
        positions_for(positions.start, len(positions), self._n_ctx)
        asked = command.capture.positions
        _check_asked(positions, asked)
        check_reach(positions, command.interventions)
        self._check_edit_room(positions, command.interventions)
        self.check_queue()
        if command.reply_limit is not None:
            n_full = len(positions) if asked is None else len(asked)
            command.reply_limit.take(n_records=len(positions), n_full=n_full)

    def _check_looks(self, positions: range, command: Read | Probe) -> None:
        """See that these may be told of, as far as they were asked for."""
        asked = command.capture.positions
        _check_asked(positions, asked)
        if isinstance(command, Read) or not command.of_study:
            self.check_queue()
        if command.reply_limit is not None:
            n_records = len(positions) if asked is None else len(asked)
            command.reply_limit.take(n_records=n_records, n_full=n_records)

    def _check_edit_room(self, positions: range, interventions: Sequence[Intervention]) -> None:
        if not interventions:
            return
        held = self._registry.edit_bytes + self._requests.edit_bytes
        n_bytes = held + self.edit_bytes(len(positions), interventions)
        if n_bytes > self._max_edit_bytes:
            raise TooManyEdits(n_bytes=n_bytes, max_bytes=self._max_edit_bytes)

    def edit_bytes(self, n_steps: int, interventions: Sequence[Intervention]) -> int:
        """What these may add to histories, from above, where `n_steps` are stepped."""
        if not interventions:
            return 0
        edits = self._registry.edits
        return edits.more(one.edit for one in interventions) + n_steps * STEP_BYTES


def check_reach(positions: range, interventions: Sequence[Intervention]) -> None:
    """See that a request which steps `positions` can make these.

    Raises:
        PositionCommitted, EditOutOfReach: it cannot.
    """
    for first, stop in chain.from_iterable(one.spans or () for one in interventions):
        for position in (first, first if stop is None else stop - 1):
            past_length = positions.start
            if position < past_length:
                raise PositionCommitted(position=position, past_length=past_length)
            if position >= positions.stop:
                raise EditOutOfReach(
                    position=position, past_length=past_length, n_new=len(positions)
                )


def _check_asked(positions: range, asked: Set[int] | None) -> None:
    for position in sorted(asked or ()):
        if position not in positions:
            raise PositionsOutOfRange(
                position=position, past_length=positions.start, n_new=len(positions)
            )


def _check_length(session: Session, expected: int | None) -> None:
    if expected is not None and expected != session.past_length:
        raise PastLengthMismatch(expected=expected, past_length=session.past_length)

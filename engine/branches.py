"""Where sessions begin, and what is stepped from there. Pure Python, no torch; the event loop.

parent   0 ...... at ............ stop ... past_length
branch   begin    | tail, stepped again    | tokens of its own
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.commands import Fork, Open
from engine.edits import Edits
from sessions.edits import Intervention, StepEdits
from sessions.errors import LengthOutOfRange
from sessions.session import Parent, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """`begin` is the session as it was when it had `at` tokens."""

    begin: Session
    tail: tuple[int, ...] = ()
    tail_edits: Mapping[int, StepEdits] = field(default_factory=dict)

    def positions(self, token_ids: tuple[int, ...]) -> range:
        """Where the tail and these tokens are stepped."""
        start = self.begin.past_length
        return range(start, start + len(self.tail) + len(token_ids))

    def edits(self, interventions: tuple[Intervention, ...], *, keep: bool) -> Edits:
        """What is edited on the branch; `keep`: the tail as it was edited in the session."""
        tail = self.tail_edits if keep else {}
        base = self.begin.past_length
        return Edits({**self.begin.edits, **tail}, interventions, base=base)


def opened(command: Open, session_id: str, created: float) -> Session:
    """A new session, empty."""
    return Session(
        id=session_id,
        created=created,
        ttl_seconds=command.ttl_seconds,
        owner=command.owner,
        metadata=command.metadata,
        record=tuple(map(str, command.record)),
    )


def forked(begin: Session, command: Fork, session_id: str, created: float) -> Session:
    """A new session with the history of `begin`."""
    return replace(
        begin,
        id=session_id,
        created=created,
        ttl_seconds=command.ttl_seconds or begin.ttl_seconds,
        metadata=command.metadata,
        parent=Parent(begin.id, past_length=begin.past_length),
    )


def branch_of(session: Session, at: int | None = None, *, stop: int | None = None) -> Branch:
    """The branch at `at` (None: the end) that steps the session's tokens up to `stop` (None: none).

    Raises:
        LengthOutOfRange: it has no such tokens.
    """
    begin = session if at is None else session.truncated(at)
    if stop is None:
        return Branch(begin=begin)
    if stop < begin.past_length:
        raise LengthOutOfRange(to=stop, past_length=session.past_length)
    replayed = session.truncated(stop)
    edits = {p: made for p, made in replayed.edits.items() if p >= begin.past_length}
    return Branch(begin=begin, tail=replayed.token_ids[begin.past_length :], tail_edits=edits)

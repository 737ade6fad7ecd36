"""Internals that sessions asked to have kept, within a budget of bytes. Numpy; the event loop.

What is kept is a copy of what a committed step showed: reading it back costs no compute, and losing
it costs no more than computing it again. So when the budget is spent, the recordings of the session
that was touched longest ago go first. Branches share what they have in common.

What is on its way here, from steps that are not committed yet, has a budget of the same size: past
it, steps go unrecorded. The model thread takes from it (`take`, `give_back`), and the event loop
counts what has arrived; neither writes the other's number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from embedding.text import IncrementalText
from embedding.tokenizer import Tokenizer
from engine.commands import Capture
from engine.events import Recorded, StepRecord
from model.batch import Floats
from model.points import Point
from sessions.session import Session

Points = Mapping[Point, Floats]


@dataclass(slots=True, eq=False)
class _Step:
    """One step's points, and how many sessions hold them."""

    points: Points
    n_bytes: int
    n_holders: int = 1


class Recordings:
    """Recorded steps by session and position."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._taken_bytes = 0  # the model thread's
        self._arrived_bytes = 0  # the event loop's
        self._sessions: dict[str, dict[int, _Step]] = {}  # in order of use

    def take(self, n_bytes: int) -> bool:
        """Whether a step of `n_bytes` may be recorded: then they are on their way. Model thread."""
        if self._taken_bytes - self._arrived_bytes + n_bytes > self.max_bytes:
            return False
        self._taken_bytes += n_bytes
        return True

    def give_back(self, recorded: Iterable[Recorded]) -> None:
        """These will not arrive. Model thread."""
        self._taken_bytes -= sum(step.n_bytes for step in recorded)

    def arrive(self, recorded: Iterable[Recorded]) -> None:
        """These are on their way no longer, whether they are kept now or not."""
        self._arrived_bytes += sum(step.n_bytes for step in recorded)

    def keep(self, session_id: str, past_length: int, recorded: Sequence[Recorded]) -> None:
        """Keep what a commit recorded, and nothing at or beyond the session's new length."""
        steps = self._used(session_id)
        self._drop(steps, [position for position in steps if position >= past_length])
        for step in recorded:
            self._keep(session_id, steps, step)
        if not steps:
            self._sessions.pop(session_id, None)

    def branch(self, session_id: str, parent_id: str, length: int) -> None:
        """Let a new session have what its parent has of their first `length` steps."""
        held = {p: step for p, step in self._used(parent_id).items() if p < length}
        for step in held.values():
            step.n_holders += 1
        if held:
            self._sessions[session_id] = held

    def forget(self, session_id: str) -> None:
        """Drop what a session has, if it has anything."""
        steps = self._sessions.pop(session_id, {})
        self._drop(steps, list(steps))

    def find(
        self, session_id: str, points: Iterable[Point], positions: Iterable[int]
    ) -> list[Points] | None:
        """The points at these positions, in their order; None if anything is missing.

        A unit of a point is found in the whole of it.
        """
        steps, wanted = self._used(session_id), list(points)
        found = []
        for position in positions:
            step = steps.get(position)
            shown = None if step is None else _selected(step.points, wanted)
            if shown is None:
                return None
            found.append(shown)
        return found

    def check(self) -> None:
        """Prove the books."""
        steps = [step for held in self._sessions.values() for step in held.values()]
        assert self.n_bytes == sum(step.n_bytes for step in set(steps)) <= self.max_bytes
        assert all(step.n_holders == steps.count(step) for step in set(steps))

    def _used(self, session_id: str) -> dict[int, _Step]:
        steps = self._sessions.pop(session_id, {})
        if steps:
            self._sessions[session_id] = steps
        return steps

    def _keep(self, session_id: str, steps: dict[int, _Step], step: Recorded) -> None:
        own = sum(kept.n_bytes for kept in steps.values())
        if own + step.n_bytes > self.max_bytes:  # nobody else's could make room
            return
        self._make_room(step.n_bytes, sparing=session_id)
        if self.n_bytes + step.n_bytes > self.max_bytes:
            return
        self.n_bytes += step.n_bytes
        steps[step.position] = _Step(step.points, step.n_bytes)
        self._sessions[session_id] = steps

    def _make_room(self, n_bytes: int, *, sparing: str) -> None:
        for session_id in list(self._sessions):
            if self.n_bytes + n_bytes <= self.max_bytes:
                return
            if session_id != sparing:
                self.forget(session_id)

    def _drop(self, steps: dict[int, _Step], positions: Iterable[int]) -> None:
        for position in positions:
            step = steps.pop(position)
            step.n_holders -= 1
            if not step.n_holders:
                self.n_bytes -= step.n_bytes


def recorded(
    session: Session, capture: Capture, recordings: Recordings, tokenizer: Tokenizer
) -> tuple[StepRecord, ...] | None:
    """Records of committed steps from what was kept of them; None if not all of it was."""
    asked = capture.positions
    positions = range(session.past_length) if asked is None else sorted(asked)
    found = recordings.find(session.id, capture.points, positions)
    if found is None:
        return None
    shown, records = IncrementalText(), []
    for index, (position, points) in enumerate(zip(positions, found, strict=True)):
        token_id = session.token_ids[position]
        text = shown.push(tokenizer.token_bytes(token_id))
        if index == len(positions) - 1:
            text += shown.flush()
        record = StepRecord(
            index=index,
            position=position,
            token_id=token_id,
            text=text,
            points=points,
            edits=session.edits.get(position, ()),
        )
        records.append(record)
    return tuple(records)


def _selected(points: Points, wanted: Iterable[Point]) -> Points | None:
    shown = {}
    for point in wanted:
        if point in points:
            shown[point] = points[point]
        elif point.whole in points:
            shown[point] = point.select(points[point.whole])
        else:
            return None
    return shown

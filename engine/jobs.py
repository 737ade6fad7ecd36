"""From admitted commands to jobs. No torch; the event loop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from embedding.tokenizer import Tokenizer
from engine.branches import Branch
from engine.commands import Append, Capture, Generate, Probe, Read
from engine.edits import Edits
from engine.events import RECORD_BYTES
from engine.generation import Generation
from engine.job import Job
from engine.reply import Reply
from engine.sight import Sight
from model.config import GPT2Config
from model.points import Point, parse_point
from sessions.session import Parent, Session


class Jobs:
    """Makes jobs for one model."""

    def __init__(self, config: GPT2Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def append(
        self, session: Session, token_ids: Sequence[int], command: Append, reply: Reply
    ) -> Job:
        """Steps of given tokens."""
        edits = Edits(session.edits, command.interventions, base=session.past_length)
        return self._job(
            "append", session, reply, command.capture, edits, token_ids, atomic=command.atomic
        )

    def generate(
        self, session: Session, generation: Generation, command: Generate, reply: Reply
    ) -> Job:
        """Steps of sampled tokens."""
        edits = Edits(session.edits, command.interventions, base=session.past_length)
        job = self._job("generate", session, reply, command.capture, edits, atomic=command.atomic)
        return replace(job, n_new=generation.max_tokens, generation=generation)

    def opening(
        self,
        session: Session,
        token_ids: Sequence[int],
        reply: Reply,
        *,
        capture: Capture,
        edits: Edits,
    ) -> Job:
        """The first steps of a new session, which is there once they are made."""
        return self._job("append", session, reply, capture, edits, token_ids, opening=True)

    def read(self, session: Session, session_id: str, command: Read, reply: Reply) -> Job:
        """Committed steps, looked at on a branch that is gone afterwards."""
        asked = command.capture.positions
        begin = session if asked is None else session.truncated(max(asked, default=-1) + 1)
        job = self._job(
            "read",
            _passing(begin, session_id, shares=not command.fresh),
            reply,
            command.capture,
            Edits(begin.edits, base=begin.past_length),
            atomic=command.atomic,
            opening=True,
            passing=True,
        )
        return replace(job, fresh=command.fresh, subject=session)

    def probe(self, branch: Branch, session_id: str, command: Probe, reply: Reply) -> Job:
        """Steps on a branch that is gone afterwards."""
        edits = branch.edits(command.interventions, keep=command.keep_edits)
        return self._job(
            "probe",
            _passing(branch.begin, session_id, shares=True),
            reply,
            command.capture,
            edits,
            branch.tail + command.token_ids,
            atomic=command.atomic,
            opening=True,
            passing=True,
        )

    def _job(
        self,
        kind: str,
        session: Session,
        reply: Reply,
        capture: Capture,
        edits: Edits,
        token_ids: Sequence[int] = (),
        **more: Any,
    ) -> Job:
        sight = Sight(capture, [] if more.get("passing") else self._recorded(session))
        return Job(
            kind=kind,
            session=session,
            new_ids=tuple(token_ids),
            n_new=len(token_ids),
            sight=sight,
            edits=edits,
            seen_bytes=sum(point.n_bytes(self._config) for point in sight.points),
            record_bytes=RECORD_BYTES + sum(p.n_bytes(self._config) for p in capture.points),
            reply=reply,
            tokenizer=self._tokenizer,
            **more,
        )

    def _recorded(self, session: Session) -> list[Point]:
        return [parse_point(name, self._config) for name in session.record]


def _passing(begin: Session, session_id: str, *, shares: bool) -> Session:
    """A branch's own session; `shares`: it begins with what is cached of `begin`."""
    parent = Parent(begin.id, past_length=begin.past_length) if shares and begin.id else None
    return replace(begin, id=session_id, parent=parent)

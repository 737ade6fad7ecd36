"""From admitted commands to jobs. No torch; the event loop."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from embedding.tokenizer import Tokenizer
from engine.branches import Branch
from engine.commands import Append, Capture, Generate, Probe, Read
from engine.edits import Edits
from engine.generation import Generation
from engine.job import Job, Kind
from engine.recordings import Recordings
from engine.reply import Reply
from engine.sight import Sight
from model.config import GPT2Config
from model.points import parse_points
from sessions.session import Parent, Session


class Jobs:
    """Makes jobs for one model."""

    def __init__(self, config: GPT2Config, tokenizer: Tokenizer, recordings: Recordings) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._recordings = recordings
        self._points = lru_cache(64)(lambda names: parse_points(names, config).points)

    def append(
        self, session: Session, token_ids: Sequence[int], command: Append, reply: Reply
    ) -> Job:
        """Steps of given tokens."""
        return self._job(
            "append",
            session,
            reply,
            command.capture,
            Edits(session.edits, command.interventions, base=session.past_length),
            token_ids=token_ids,
            atomic=command.atomic,
        )

    def generate(
        self, session: Session, generation: Generation, command: Generate, reply: Reply
    ) -> Job:
        """Steps of sampled tokens."""
        return self._job(
            "generate",
            session,
            reply,
            command.capture,
            Edits(session.edits, command.interventions, base=session.past_length),
            generation=generation,
            atomic=command.atomic,
        )

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
        return self._job("open", session, reply, capture, edits, token_ids=token_ids)

    def read(self, session: Session, session_id: str, command: Read, reply: Reply) -> Job:
        """Committed steps, looked at on a branch that is gone afterwards."""
        asked = command.capture.positions
        begin = session if asked is None else session.truncated(max(asked, default=-1) + 1)
        return self._job(
            "read",
            _passing(begin, session_id, shares=not command.fresh),
            reply,
            command.capture,
            Edits(begin.edits, base=begin.past_length),
            atomic=command.atomic,
            fresh=command.fresh,
            subject=session,
        )

    def probe(self, branch: Branch, session_id: str, command: Probe, reply: Reply) -> Job:
        """Steps on a branch that is gone afterwards."""
        return self._job(
            "probe",
            _passing(branch.begin, session_id, shares=True),
            reply,
            command.capture,
            branch.edits(command.interventions, keep=command.keep_edits),
            token_ids=branch.tail + command.token_ids,
            atomic=command.atomic,
            subject=branch.begin if branch.begin.id else None,
        )

    def _job(
        self,
        kind: Kind,
        session: Session,
        reply: Reply,
        capture: Capture,
        edits: Edits,
        *,
        token_ids: Sequence[int] = (),
        generation: Generation | None = None,
        atomic: bool = True,
        fresh: bool = False,
        subject: Session | None = None,
    ) -> Job:
        recorded = () if subject else self._points(session.record)
        sight = Sight(capture, recorded, self._recordings, self._config)
        return Job(
            kind=kind,
            session=session,
            new_ids=tuple(token_ids),
            sight=sight,
            edits=edits,
            reply=reply,
            tokenizer=self._tokenizer,
            generation=generation,
            atomic=atomic,
            fresh=fresh,
            subject=subject,
        )


def _passing(begin: Session, session_id: str, *, shares: bool) -> Session:
    """A branch's own session; `shares`: it begins with what is cached of `begin`."""
    parent = Parent(begin.id, past_length=begin.past_length) if shares and begin.id else None
    return replace(begin, id=session_id, parent=parent)

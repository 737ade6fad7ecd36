"""`/v1/sessions/{id}/activations`: internals of past positions. The event loop."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from engine.commands import Capture, Read, ReplyLimit
from engine.errors import ReplyTooLarge
from engine.events import Done, Started, StepRecord, Usage
from engine.reply import Reply
from model.points import parse_points
from server.answers import documented
from server.desk import Route, SessionId, TheService, form_of
from server.errors import AnswerTooLarge
from server.host import Service
from server.inputs import Report, committed_positions, new_report, split_names, told_bytes
from server.negotiation import STREAMS, EncodingFormat, Form
from server.replies import answer_steps
from server.studies.answers import Activations
from sessions.session import Session

router = APIRouter(prefix="/v1/sessions", tags=["inside"], route_class=Route)

FORMS = (*STREAMS, Form.STACKED)


@router.get("/{session_id}/activations", **documented(Activations, streams=True))
async def get_activations(
    service: TheService,
    request: Request,
    session_id: SessionId,
    points: Annotated[str, Query(max_length=65_536)] = "embedding",
    positions: Annotated[str | None, Query(max_length=8192)] = None,
    encoding_format: EncodingFormat = "base64",
) -> Response:
    """What committed steps had inside: as it was recorded, or computed from what is cached.

    It never waits for what the session is doing: it sees the last commit.
    """
    session = service.engine.view(session_id).session
    asked = committed_positions(positions, session.past_length)
    selection = parse_points(split_names(points), service.facts.config)
    capture = Capture(points=selection.points, positions=frozenset(asked))
    form = form_of(request, forms=FORMS)
    report = new_report(selection, capture, form, encoding_format, service.facts.config)
    return _answer(service, session, report)


def _answer(service: Service, session: Session, report: Report) -> Response:
    streams, engine = report.form.streams, service.engine
    command = Read(session_id=session.id, capture=report.capture, atomic=not streams)
    recorded = engine.recorded(command) if report.capture.positions else ()

    def begin(limit: ReplyLimit | None) -> Reply:
        try:
            if recorded is None:
                return engine.read(replace(command, reply_limit=limit))
            if limit is not None:
                limit.take(n_records=len(recorded), n_full=len(recorded))
        except ReplyTooLarge as error:
            raise AnswerTooLarge(
                n_bytes=error.n_bytes, max_bytes=error.max_bytes, param="positions"
            ) from error
        return _ready(session, recorded)

    head = {"object": "activations", "source": "recorded" if recorded else "rebuilt"}
    return answer_steps(service, session.id, _told(report, session, head), begin)


def _told(report: Report, session: Session, head: dict[str, Any]) -> Report:
    most_edited = max(session.edits.values(), key=told_bytes, default=())
    return replace(report.with_edits(most_edited), head=head)


def _ready(session: Session, records: tuple[StepRecord, ...]) -> Reply:
    """The reply of what is there already."""
    reply = Reply(on_cancel=lambda _reply: None, wake=lambda: None)
    reply.put(Started(), 0)
    reply.put(Done(session, Usage(steps=len(records)), records), 0)
    return reply

"""`/v1/sessions`: open, list, look at, roll back, fork, close. The event loop."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator

from engine.branches import Branch
from engine.commands import Fork, Open, ReplyLimit, Truncate
from engine.reply import Reply
from model.errors import TooManyPoints, UnknownPoint
from model.points import parse_points
from server.answers import (
    Forked,
    SessionDeleted,
    SessionList,
    SessionState,
    TokenList,
    documented,
)
from server.desk import (
    Route,
    SessionId,
    TheService,
    form_of,
    json_response,
    json_when_done,
)
from server.errors import blaming
from server.host import Service
from server.inputs import check_token_ids, plain_int, report_of, token_ids_of, told_bytes
from server.interventions.plan import check_masks, plan_of
from server.interventions.values import resolve
from server.replies import answer_steps
from server.schemas import ForkBody, OpenBody, TruncateBody
from sessions.edits import StepEdits
from sessions.errors import LengthOutOfRange

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=Route)

_NO_TOKENS = OpenBody()
_ALL_OF_IT = ForkBody()


@router.post("", **documented(SessionState, status=201))
async def open_session(service: TheService, body: OpenBody = _NO_TOKENS) -> Response:
    """Open a session, optionally with a first append; if that is refused there is no session."""
    engine, life = service.engine, ExitStack()
    with blaming("record", (UnknownPoint, TooManyPoints)):
        record = parse_points(body.record, service.facts.config).points
    check_token_ids(body, engine.tokenizer)
    command = Open(
        token_ids=await token_ids_of(body, engine.tokenizer),
        prepend_bos=body.prepend_bos,
        ttl_seconds=body.ttl_seconds or service.settings.session_ttl,
        metadata=body.metadata,
        record=record,
    )

    async def work() -> dict[str, Any]:
        with blaming(body.given or "prepend_bos"):
            view = await engine.open(command)
        life.enter_context(engine.using(view.session.id))  # its idle time begins with the answer
        return service.wire.session(view)

    return json_when_done(service, work, life, status=201)


@router.get("", **documented(SessionList))
async def list_sessions(
    service: TheService,
    limit: Annotated[int, BeforeValidator(plain_int), Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """Sessions, newest first; `after` is the last id of the page before."""
    page = service.engine.views(limit=limit, after=after)
    data = [service.wire.session(view) for view in page.views]
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": page.has_more,
        }
    )


@router.get("/{session_id}", **documented(SessionState))
async def get_session(service: TheService, session_id: SessionId) -> Response:
    """A session as its last commit left it."""
    return json_response(service.wire.session(service.engine.view(session_id)))


@router.delete("/{session_id}", **documented(SessionDeleted))
async def delete_session(service: TheService, session_id: SessionId) -> Response:
    """Close a session; a stream that runs on it ends with `session_deleted`."""
    await service.engine.delete(session_id)
    return json_response({"id": session_id, "object": "session.deleted", "deleted": True})


@router.get("/{session_id}/tokens", **documented(TokenList))
async def get_tokens(service: TheService, session_id: SessionId) -> Response:
    """Every committed token: what is cached can be read back."""
    token_ids = service.engine.view(session_id).session.token_ids
    tokens = [
        {"position": position, **service.wire.token(token_id)}
        for position, token_id in enumerate(token_ids)
    ]
    return json_response({"object": "list", "data": tokens})


@router.post("/{session_id}/truncate", **documented(SessionState))
async def truncate_session(
    service: TheService, session_id: SessionId, body: TruncateBody
) -> Response:
    """Roll back to the first `to` tokens."""
    command = Truncate(session_id=session_id, to=body.to, past_length=body.past_length)
    return json_response(service.wire.session(await service.engine.truncate(command)))


@router.post("/{session_id}/fork", **documented(Forked, status=201, streams=True))
async def fork_session(
    service: TheService, request: Request, session_id: SessionId, body: ForkBody = _ALL_OF_IT
) -> Response:
    """Branch: a new session that begins as this one does, with steps of its own after it.

    It never waits for what this session is doing. If a step is refused there is no branch. Whoever
    says something of its steps (replay, interventions, points and the like) is told of each.
    """
    engine, config = service.engine, service.facts.config
    report = report_of(body, form_of(request, stream=body.stream), config)
    check_token_ids(body, engine.tokenizer)
    plan = await plan_of(body.interventions, config)
    _check_branch(service, session_id, body)  # before a text costs anything
    with engine.using(session_id):
        command = Fork(
            session_id=session_id,
            at=body.at,
            past_length=body.past_length,
            replay=body.replay,
            keep_edits=body.edits == "keep",
            token_ids=await token_ids_of(body, engine.tokenizer),
            interventions=tuple(one.made() for one in plan),
            capture=report.capture,
            ttl_seconds=body.ttl_seconds,
            metadata=body.metadata,
        )
        with _blaming(body):
            branch = engine.admission.fork(command)
        check_masks(plan, branch.positions(command.token_ids))
        interventions = await resolve(service, plan)

    def begin(limit: ReplyLimit | None) -> Reply:
        with _blaming(body):
            return engine.fork(replace(command, interventions=interventions, reply_limit=limit))

    if body.is_about_steps:
        report = report.with_edits([*plan, *_longest_told(branch, body)])
        return answer_steps(service, session_id, report, begin, opens=True)
    return _new_session(service, session_id, begin)


@contextmanager
def _blaming(body: ForkBody) -> Iterator[None]:
    """Say which field asked for a branch that cannot be."""
    with blaming("at", LengthOutOfRange), blaming(body.given or "at"):
        yield


def _check_branch(service: Service, session_id: str, body: ForkBody) -> None:
    with _blaming(body):
        service.engine.admission.branch(
            session_id, at=body.at, replay=body.replay, past_length=body.past_length
        )


def _longest_told(branch: Branch, body: ForkBody) -> StepEdits:
    """Of the replayed steps, the edits of the one whose record tells the most of them."""
    if body.edits != "keep":
        return ()
    return max(branch.tail_edits.values(), key=told_bytes, default=())


def _new_session(
    service: Service, parent_id: str, begin: Callable[[ReplyLimit | None], Reply]
) -> Response:
    """The session alone."""
    engine, life = service.engine, ExitStack()

    async def work() -> dict[str, Any]:
        life.enter_context(engine.using(parent_id))
        async with begin(None) as reply:
            session = (await reply.result()).session
        life.enter_context(engine.using(session.id))
        return service.wire.session(engine.view_of(session))

    return json_when_done(service, work, life, status=201)

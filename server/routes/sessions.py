"""`/v1/sessions`: open, list, look at, roll back, fork, close. The event loop."""

from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BeforeValidator

from engine.commands import Fork, Open, Truncate
from server.answers import SessionDeleted, SessionList, SessionState, TokenList, documented
from server.desk import Route, SessionId, TheService, json_response, json_when_done
from server.errors import blaming
from server.inputs import check_token_ids, plain_int, token_ids_of
from server.schemas import ForkBody, OpenBody, TruncateBody
from sessions.errors import LengthOutOfRange

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=Route)

_NO_TOKENS = OpenBody()
_ALL_OF_IT = ForkBody()


@router.post("", **documented(SessionState, status=201))
async def open_session(service: TheService, body: OpenBody = _NO_TOKENS) -> Response:
    """Open a session, optionally with a first append; if that is refused there is no session."""
    engine, life = service.engine, ExitStack()
    check_token_ids(body, engine.tokenizer)
    command = Open(
        token_ids=await token_ids_of(body, engine.tokenizer),
        prepend_bos=body.prepend_bos,
        ttl_seconds=body.ttl_seconds or service.settings.session_ttl,
        metadata=body.metadata,
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


@router.post("/{session_id}/fork", **documented(SessionState, status=201))
async def fork_session(
    service: TheService, session_id: SessionId, body: ForkBody = _ALL_OF_IT
) -> Response:
    """Branch: a new session that begins as this one does, with tokens of its own after it.

    It never waits for what this session is doing. If its tokens are refused there is no branch.
    """
    engine, life = service.engine, ExitStack()
    check_token_ids(body, engine.tokenizer)
    with blaming("at", LengthOutOfRange):  # before a text costs anything
        engine.admission.branch(session_id, at=body.at, past_length=body.past_length)
    with engine.using(session_id):
        token_ids = await token_ids_of(body, engine.tokenizer)
    command = Fork(
        session_id=session_id,
        at=body.at,
        past_length=body.past_length,
        token_ids=token_ids,
        ttl_seconds=body.ttl_seconds,
        metadata=body.metadata,
    )

    async def work() -> dict[str, Any]:
        life.enter_context(engine.using(session_id))
        with blaming("at", LengthOutOfRange), blaming(body.given or "at"):
            view = await engine.fork(command)
        life.enter_context(engine.using(view.session.id))
        return service.wire.session(view)

    return json_when_done(service, work, life, status=201)

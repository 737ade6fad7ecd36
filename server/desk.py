"""What route handlers share: the parts of a request that FastAPI should fetch, and the answers.

The event loop.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from email.message import Message
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Path, Request, Response
from fastapi.routing import APIRoute

from engine.commands import ReplyLimit
from engine.events import Done, Failed, Progress
from engine.reply import Reply
from server.errors import (
    AnswerTooLarge,
    InvalidRequest,
    NotSupported,
    UnsupportedMediaType,
    problem,
)
from server.host import Host, Service
from server.inputs import Report
from server.negotiation import Form, negotiate
from server.streaming import (
    WRITE_BYTES,
    Batch,
    Ending,
    JsonAnswer,
    Pace,
    RecordStream,
    Source,
    steps_json,
)
from server.wire import dumps, usage_json
from sessions.errors import SessionError

TINY_BODY = 64 * 1024
MAX_VALUES = 262_144
"""Commas and opening brackets of a body, those in its strings included."""

_OPENING = b",[{"
_SLICE = 1024 * 1024


def host_of(request: Request) -> Host:
    """The process's host, whatever its state."""
    host: Host = request.app.state.host
    return host


def service_of(host: Annotated[Host, Depends(host_of)]) -> Service:
    """What is served.

    Raises:
        Loading, ShuttingDown: nothing is.
    """
    return host.service


TheHost = Annotated[Host, Depends(host_of)]
TheService = Annotated[Service, Depends(service_of)]
SessionId = Annotated[str, Path(description="as `POST /v1/sessions` gave it")]


async def check_request(request: Request) -> None:
    """What holds for every route: no unknown query name, a JSON body, nothing that is not built.

    Raises:
        InvalidRequest, NotSupported, UnsupportedMediaType: in this order.
    """
    _check_query(request)
    if "idempotency-key" in request.headers:
        raise NotSupported(
            "Idempotency-Key is not supported by this version: send the expected past_length",
            param="Idempotency-Key",
        )
    if await request.body():
        _check_body(request)


def _check_body(request: Request) -> None:
    if request.scope["route"].body_field is None:
        raise InvalidRequest("this route takes no body")
    headers = request.headers
    encoded = headers.get("content-encoding", "identity").lower() != "identity"
    if encoded or not _is_json(headers.get("content-type", "")):
        raise UnsupportedMediaType


def _check_query(request: Request) -> None:
    route = request.scope["route"]
    known = {field.alias for field in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(f"unknown query name {name[:80]!r}", param=name[:80])
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidRequest(f"{name} is given more than once", param=name)


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    charset = message.get_content_charset("utf-8")
    return message.get_content_type() == Form.JSON.value and charset == "utf-8"


class _JsonRequest(Request):
    """A request whose body is parsed on a worker thread when it is large.

    The parser is one call, which keeps the interpreter from every other thread until it returns. So
    its time is bounded by the number of values; counting them lets others run between slices.
    """

    async def json(self) -> Any:
        body = await self.body()
        return await asyncio.to_thread(_parse, body) if len(body) > TINY_BODY else _parse(body)


def _parse(body: bytes) -> Any:
    """The standard library's parser: it knows half surrogate pairs, and refuses deep nesting.

    Raises:
        HTTPException: there are too many values in it. FastAPI hides any other error of a parser.
    """
    if _n_values(body) > MAX_VALUES:
        raise HTTPException(400, f"the body has more than {MAX_VALUES} values")
    return json.loads(body.decode())


def _n_values(body: bytes) -> int:
    """At least as many as the body's values, but for one."""
    slices = (body[at : at + _SLICE] for at in range(0, len(body), _SLICE))
    return sum(len(part) - len(part.translate(None, _OPENING)) for part in slices)


class Route(APIRoute):
    """A route whose requests are `_JsonRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


def json_response(value: object, status: int = 200) -> Response:
    """A small answer, ready now."""
    return Response(
        dumps(value),
        status_code=status,
        media_type=Form.JSON.value,
        headers={"cache-control": "no-store"},
    )


def json_when_done(
    service: Service,
    work: Callable[[], Coroutine[Any, Any, object]],
    life: AbstractContextManager[object],
    *,
    status: int = 200,
) -> Response:
    """An answer that takes a while; the work is cancelled if the client leaves."""

    async def encoded() -> list[bytes]:
        return [dumps(await work())]

    return JsonAnswer(
        encoded, life=life, write_timeout=service.settings.write_timeout, status=status
    )


def stateless_json(
    service: Service, work: Callable[[], object], *, held_bytes: int, param: str
) -> Response:
    """An answer that needs no session; one of many bytes is made on a worker thread.

    `held_bytes` is an estimate, from above. `param` is to blame if the answer is too large.
    """
    max_bytes = service.settings.max_response_bytes

    def encode() -> bytes:
        body = dumps(work())
        if len(body) > max_bytes:
            raise AnswerTooLarge(n_bytes=len(body), max_bytes=max_bytes, param=param)
        return body

    async def encoded() -> list[bytes]:
        return [await asyncio.to_thread(encode) if held_bytes > WRITE_BYTES else encode()]

    life = service.holding(held_bytes)
    return JsonAnswer(encoded, life=life, write_timeout=service.settings.write_timeout)


def form_of(request: Request, *, stream: bool) -> Form:
    """The form that the client wants its answer in.

    Raises:
        NotSupported: one that is not built.
    """
    return negotiate(", ".join(request.headers.getlist("accept")), stream=stream)


def answer_steps(
    service: Service,
    session_id: str,
    report: Report,
    begin: Callable[[ReplyLimit | None], Reply],
) -> Response:
    """What `begin`'s reply brings, in the form that was asked for.

    Until the answer's last byte the session does not expire and the answer's room is held; the work
    does not outlive it.
    """
    with ExitStack() as life:
        room = life.enter_context(service.answers.lease())
        life.enter_context(service.engine.using(session_id))
        reply = begin(report.limit(service.settings.max_response_bytes, room.grow))
        life.callback(reply.cancel)
        return _steps_response(service, session_id, reply, report, life.pop_all())


def _steps_response(
    service: Service, session_id: str, reply: Reply, report: Report, life: ExitStack
) -> Response:
    if report.form.streams:
        return record_stream(service, _source(service, session_id, reply, report), report, life)

    async def work() -> list[bytes]:
        done = await reply.result()
        session = service.wire.session(service.engine.view_of(done.session))
        return await steps_json(
            {"object": "steps", "session": session},
            done.records,
            {"usage": usage_json(done.usage), **report.aliases},
            wire=service.wire,
            encoding=report.encoding,
            bytes_per_record=report.bytes_per_record,
        )

    return JsonAnswer(work, life=life, write_timeout=service.settings.write_timeout)


def record_stream(
    service: Service, source: Source, report: Report, life: AbstractContextManager[object]
) -> RecordStream:
    """A stream with this server's times."""
    pace = Pace(
        write_timeout=service.settings.write_timeout,
        ping_seconds=service.settings.ping_seconds,
        bytes_per_record=report.bytes_per_record,
    )
    return RecordStream(
        source, form=report.form, wire=service.wire, encoding=report.encoding, pace=pace, life=life
    )


def _source(service: Service, session_id: str, reply: Reply, report: Report) -> Source:
    async def failed(error: Exception) -> Mapping[str, Any]:
        """The length is told after the work has ended: it would go on otherwise."""
        reply.cancel()
        async for _event in reply:
            pass
        session = None
        with suppress(SessionError):  # it may be gone meanwhile
            session = service.wire.session(service.engine.view(session_id))
        return {"error": problem(error).error, "session": session}

    return Source(
        started=reply.started, pieces=lambda: _pieces(service, reply, report), failed=failed
    )


async def _pieces(
    service: Service, reply: Reply, report: Report
) -> AsyncGenerator[Batch | Ending, None]:
    """The engine's events as what is sent."""
    async for event in reply:
        if isinstance(event, Progress):
            yield Batch(event.records)
            continue
        if isinstance(event, Done) and event.records:
            yield Batch(event.records)
        yield Ending(_terminal(service, event, report), failed=isinstance(event, Failed))


def _terminal(service: Service, event: Done | Failed, report: Report) -> Mapping[str, Any]:
    session = event.session and service.wire.session(service.engine.view_of(event.session))
    if isinstance(event, Failed):
        return {"error": problem(event.error).error, "session": session}
    return {
        "object": "done",
        "session": session,
        "usage": usage_json(event.usage),
        **report.aliases,
    }

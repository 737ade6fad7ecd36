"""What route handlers share: the parts of a request that FastAPI should fetch, and the answers.

The event loop.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Annotated, Any

from fastapi import Depends, Path, Request, Response
from fastapi.routing import APIRoute

from engine.events import Done, Failed, Progress
from engine.reply import Reply
from server.errors import InvalidRequest, NotSupported, UnsupportedMediaType, problem
from server.host import Host, Service
from server.inputs import Report
from server.negotiation import Form, negotiate
from server.streaming import Batch, Ending, JsonAnswer, Pace, RecordStream, Source, steps_json
from server.wire import dumps, usage_json

TINY_BODY = 64 * 1024


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
    if await request.body() and not _is_json(request.headers.get("content-type", "")):
        raise UnsupportedMediaType


def _check_query(request: Request) -> None:
    route = request.scope["route"]
    known = {field.alias for field in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(f"unknown query name {name[:80]!r}", param=name[:80])


def _is_json(content_type: str) -> bool:
    media, _, parameters = content_type.lower().partition(";")
    charset = parameters.partition("charset=")[2].strip(' "')
    return media.strip() == Form.JSON.value and charset in ("", "utf-8")


class _JsonRequest(Request):
    """A request whose body is parsed off the event loop when it is large."""

    async def json(self) -> Any:
        body = await self.body()
        return await asyncio.to_thread(_parse, body) if len(body) > TINY_BODY else _parse(body)


def _parse(body: bytes) -> Any:
    """The standard library's parser: it knows half surrogate pairs, and refuses deep nesting."""
    return json.loads(body.decode())


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
    service: Service, work: Callable[[], Coroutine[Any, Any, object]], *, status: int = 200
) -> Response:
    """An answer that takes a while; the work is cancelled if the client leaves."""

    async def encoded() -> bytes:
        return dumps(await work())

    return JsonAnswer(encoded, write_timeout=service.settings.write_timeout, status=status)


def form_of(request: Request, *, stream: bool) -> Form:
    """The form that the client wants its answer in.

    Raises:
        NotSupported: one that is not built.
    """
    return negotiate(", ".join(request.headers.getlist("accept")), stream=stream)


def answer_steps(service: Service, reply: Reply, report: Report) -> Response:
    """What a reply brings, in the form that was asked for."""
    if report.form.streams:
        return _stream_steps(service, reply, report)

    async def work() -> bytes:
        async with reply:
            done = await reply.result()
        session = service.wire.session(service.engine.view_of(done.session))
        return await steps_json(
            {"object": "steps", "session": session},
            done.records,
            {"usage": usage_json(done.usage), **_aliases(report)},
            wire=service.wire,
            encoding=report.encoding,
            bytes_per_record=report.capture.bytes_per_record,
        )

    return JsonAnswer(work, write_timeout=service.settings.write_timeout)


def _stream_steps(service: Service, reply: Reply, report: Report) -> Response:
    source = Source(
        started=reply.started, pieces=lambda: _pieces(service, reply, report), work=reply
    )
    return record_stream(service, source, report)


def record_stream(service: Service, source: Source, report: Report) -> RecordStream:
    """A stream with this server's times."""
    pace = Pace(
        write_timeout=service.settings.write_timeout,
        ping_seconds=service.settings.ping_seconds,
        bytes_per_record=report.capture.bytes_per_record,
    )
    return RecordStream(
        source, form=report.form, wire=service.wire, encoding=report.encoding, pace=pace
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
        **_aliases(report),
    }


def _aliases(report: Report) -> dict[str, Any]:
    return {"aliases": dict(report.aliases)} if report.aliases else {}

"""What route handlers share: the parts of a request that FastAPI should fetch, and the answers.

The event loop.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractContextManager
from email.message import Message
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Path, Request, Response
from fastapi.routing import APIRoute

from server.errors import (
    AnswerTooLarge,
    InvalidRequest,
    NotSupported,
    UnsupportedMediaType,
)
from server.host import Host, Service
from server.inputs import Report
from server.negotiation import STREAMS, Form, negotiate
from server.streaming import (
    WRITE_BYTES,
    Pace,
    RecordStream,
    Source,
    WholeAnswer,
)
from server.wire import dumps

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


def takes(*media_types: str) -> dict[str, Any]:
    """Keywords of a route whose body is bytes of one of these types."""
    content = {media: {"schema": {"type": "string", "format": "binary"}} for media in media_types}
    return {"openapi_extra": {"requestBody": {"content": content, "required": True}}}


def _check_body(request: Request) -> None:
    accepted = _accepted(request.scope["route"])
    if not accepted:
        raise InvalidRequest("this route takes no body")
    headers = request.headers
    encoded = headers.get("content-encoding", "identity").lower() != "identity"
    if encoded or _media_type(headers.get("content-type", "")) not in accepted:
        raise UnsupportedMediaType(*accepted)


def _accepted(route: APIRoute) -> tuple[str, ...]:
    """Types of the bodies that a route takes: JSON where it has a model of one, or see `takes`."""
    if route.body_field is not None:
        return (Form.JSON.value,)
    return tuple((route.openapi_extra or {}).get("requestBody", {}).get("content", ()))


def _check_query(request: Request) -> None:
    route = request.scope["route"]
    known = {field.alias for field in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(f"unknown query name {name[:80]!r}", param=name[:80])
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidRequest(f"{name} is given more than once", param=name)


def _media_type(content_type: str) -> str | None:
    """The type alone; None if it is text in another encoding than UTF-8."""
    message = Message()
    message["content-type"] = content_type
    return message.get_content_type() if message.get_content_charset("utf-8") == "utf-8" else None


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

    return WholeAnswer(
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
    return WholeAnswer(encoded, life=life, write_timeout=service.settings.write_timeout)


def form_of(request: Request, *, stream: bool = False, forms: Collection[Form] = STREAMS) -> Form:
    """The form that the client wants its answer in, of those that the route has, or JSON."""
    accept = ", ".join(request.headers.getlist("accept"))
    return negotiate(accept, stream=stream, forms=forms)


def record_stream(
    service: Service,
    source: Source,
    report: Report,
    life: AbstractContextManager[object],
    *,
    largest_record: int,
    status: int = 200,
) -> RecordStream:
    """A stream with this server's times. `largest_record`: about how many bytes it has."""
    pace = Pace(
        write_timeout=service.settings.write_timeout,
        ping_seconds=service.settings.ping_seconds,
        largest_record=largest_record,
    )
    return RecordStream(
        source,
        form=report.form,
        wire=service.wire,
        encoding=report.encoding,
        pace=pace,
        life=life,
        status=status,
    )

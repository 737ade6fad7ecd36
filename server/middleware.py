"""What happens around every request, as plain ASGI: request id, log line, timing, body limit.

Framework middleware that wraps responses would hold streams back and hide disconnects. The event
loop. Nothing here logs a prompt, an id list, a query or a session's path.
"""

import re
import time
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.budget import Budget, Lease
from server.connection import ClientGone, send_bounded
from server.errors import BodyTooLarge, NotSupported, Overloaded
from server.problems import Problem, problem

_log = structlog.get_logger("stepscope.access")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_QUIET = frozenset({"/health", "/ready", "/metrics"})
CLIENT_LEFT = 499  # nginx's status for a client that left before it was answered


class HttpObserver(Protocol):
    """Somebody who counts requests."""

    def http_request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One request was answered, or its client left."""
        ...


class RequestContext:
    """Gives each request its id and each write a limit, makes a fault a 500, logs one line."""

    def __init__(self, app: ASGIApp, *, observer: HttpObserver, write_timeout: float) -> None:
        self._app = app
        self._observer = observer
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; anything else passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        answer = _Answer(scope, send, request_id, self._write_timeout)
        began = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._guarded(scope, receive, answer)
            finally:
                self._tell(scope, answer.status, time.perf_counter() - began)

    async def _guarded(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        try:
            await self._app(scope, receive, answer)
        except ClientGone:
            await _heard_of_the_end(receive)
        except Exception as error:
            if answer.started:
                raise  # the connection is closed: the client sees that the answer is cut
            _log.exception("request_failed")
            await send_problem(answer, problem(error))

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"]
        write = _log.debug if route in _QUIET else _log.info
        write("request", method=method, route=route, status=status, ms=round(seconds * 1e3, 1))
        self._observer.http_request(method=method, route=route, status=status, seconds=seconds)


class _Answer:
    """A `send` that adds the request id, remembers the status, and does not wait for ever."""

    def __init__(self, scope: Scope, send: Send, request_id: str, write_timeout: float) -> None:
        self._scope = scope
        self._send = send
        self._request_id = request_id
        self._write_timeout = write_timeout
        self.status = CLIENT_LEFT
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            MutableHeaders(raw=message["headers"])["x-request-id"] = self._request_id
        await send_bounded(self._scope, self._send, message, seconds=self._write_timeout)


class BodyLimit:
    """Reads the body before the application does, and no more of it than is allowed.

    A `Content-Length` that is too large is refused before a byte is read; without one, or with a
    lying one, the bytes are counted. All bodies in flight share a budget.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, budget: Budget) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; anything else passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._budget.lease() as lease:
            try:
                body = await self._read(Headers(scope=scope), receive, lease)
            except (BodyTooLarge, NotSupported, Overloaded) as error:
                unread = {"connection": "close"}  # the rest of the body stays there
                await send_problem(send, problem(error), headers=unread)
                return
            if body is not None:
                await self._app(scope, _Replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive, lease: Lease) -> bytes | None:
        """The whole body; None if the client left."""
        if "upgrade" in headers and ("content-length" in headers or "transfer-encoding" in headers):
            raise NotSupported(  # the parser takes the body for the other protocol's first bytes
                "a request with a body cannot ask to upgrade the connection", param="Upgrade"
            )
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            if lease.n_bytes + len(chunk) > self._max_bytes:
                raise BodyTooLarge(self._max_bytes)
            lease.grow(len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)


class _Replay:
    """A `receive` that gives the body that was read, then what the client does next."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _heard_of_the_end(receive: Receive) -> None:
    """Wait until the server knows that the connection is aborted: it would still answer for us."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_problem(
    send: Send, told: Problem, *, headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Answer with an error, outside of the framework."""
    body = told.body
    raw = _raw(
        {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **told.headers,
            **headers,
        }
    )
    await send({"type": "http.response.start", "status": told.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _request_id(given: str | None) -> str:
    """The client's id where it is harmless in a log, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex

"""One table from error classes to HTTP: status, type, code, param, numbers. Event loop.

ServerError                  what the HTTP side itself can refuse
├── InvalidRequest               a request that is wrong in itself
├── EmptyInput                   no text and no ids
├── NotSupported                 named by the API, not built yet: refused, never ignored
├── UnsupportedMediaType         a body that is not JSON
├── BodyTooLarge                 more bytes than the server reads
├── AnswerTooLarge               more bytes than one answer without a session may have
├── Overloaded                   the requests in flight hold as many bytes as they may
├── ModelNotFound                another model than the one that is served
├── BudgetTooSmall               the K/V budget holds less than one session: no start
├── Loading                      the weights are not there yet
├── Stalled                      the model thread shows no life
└── Blamed                       another package's error, with the field that caused it

A subclass without a line of its own takes its nearest ancestor's; what has none is a fault.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from embedding.errors import EmbeddingError, PositionOverflow, TextTooLong, TokenIdOutOfRange
from engine.errors import (
    BosNotAtStart,
    Cancelled,
    Drained,
    EmptySession,
    EngineDown,
    NoRoom,
    PastLengthMismatch,
    PositionsOutOfRange,
    QueueFull,
    ReplyTooLarge,
    SessionBusy,
    SessionDeleted,
    ShuttingDown,
    StepFailed,
)
from model.errors import UnknownPoint
from sessions.errors import LengthOutOfRange, SessionExpired, SessionNotFound, TooManySessions


class ServerError(Exception):
    """Root of this package's errors. `param` is the top-level field that is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class InvalidRequest(ServerError):
    """The request is wrong in itself."""


class EmptyInput(ServerError):
    """Neither text nor ids where some are needed."""


class NotSupported(ServerError):
    """The API names it, this version does not have it."""


class UnsupportedMediaType(ServerError):
    """The body is not `application/json`."""

    def __init__(self) -> None:
        super().__init__(
            "the body must be sent as Content-Type: application/json, in UTF-8 and not encoded"
        )


class BodyTooLarge(ServerError):
    """The body has more bytes than the server reads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        super().__init__(f"the body is larger than {max_bytes} bytes")


class AnswerTooLarge(ServerError):
    """One answer would hold more bytes than the server allows."""

    def __init__(self, *, n_bytes: int, max_bytes: int, param: str) -> None:
        self.n_bytes = n_bytes
        self.max_bytes = max_bytes
        super().__init__(
            f"the answer would be {n_bytes} bytes, over the limit of {max_bytes}", param=param
        )


class Overloaded(ServerError):
    """The requests in flight hold as many bytes as they may, all together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        super().__init__(f"the requests in flight hold {max_bytes} bytes, which is the limit")


class ModelNotFound(ServerError):
    """Another model than the served one was asked for."""


class BudgetTooSmall(ServerError):
    """The K/V budget holds less than one full session."""


class Loading(ServerError):
    """The weights are not there yet."""


class Stalled(ServerError):
    """The model thread has shown no life for too long."""


class Blamed(ServerError):
    """`cause`, together with the field that caused it."""

    def __init__(self, cause: Exception, *, param: str) -> None:
        self.cause = cause
        super().__init__(str(cause), param=param)


@contextmanager
def blaming(param: str, kind: type[Exception] = EmbeddingError) -> Iterator[None]:
    """Say of an error of this kind inside, one about tokens by default, that `param` caused it."""
    try:
        yield
    except kind as error:
        raise Blamed(error, param=param) from error


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `numbers` are attributes of the error, shown in the envelope."""

    status: int
    code: str
    param: str | None = None
    numbers: tuple[str, ...] = ()
    retry_after: int | None = None

    @property
    def type(self) -> str:
        """OpenAI's coarse kinds, by status."""
        by_status = {404: "not_found_error", 429: "rate_limit_error"}
        return by_status.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )


FAULT = Row(500, "internal_error")

TABLE: Mapping[type[Exception], Row] = {
    PositionOverflow: Row(
        400, "context_length_exceeded", numbers=("n_ctx", "past_length", "n_new")
    ),
    TextTooLong: Row(400, "context_length_exceeded", "prompt", ("n_ctx", "n_bytes", "max_bytes")),
    TokenIdOutOfRange: Row(400, "invalid_request", "token_ids", ("index", "n_vocab")),
    UnknownPoint: Row(400, "unknown_point", "points"),
    InvalidRequest: Row(400, "invalid_request"),
    EmptyInput: Row(400, "empty_input"),
    NotSupported: Row(400, "not_supported"),
    EmptySession: Row(400, "empty_session"),
    PositionsOutOfRange: Row(
        400, "invalid_request", "points_at", ("position", "past_length", "n_new")
    ),
    BosNotAtStart: Row(400, "invalid_request", "prepend_bos", ("past_length",)),
    LengthOutOfRange: Row(400, "invalid_request", "to", ("past_length",)),
    ReplyTooLarge: Row(400, "response_too_large", "points", ("n_bytes", "max_bytes")),
    AnswerTooLarge: Row(400, "response_too_large", numbers=("n_bytes", "max_bytes")),
    SessionNotFound: Row(404, "session_not_found"),
    ModelNotFound: Row(404, "model_not_found", "model"),
    SessionBusy: Row(409, "session_busy", retry_after=1),
    PastLengthMismatch: Row(
        409, "past_length_mismatch", "past_length", ("expected", "past_length")
    ),
    SessionExpired: Row(410, "session_expired"),
    SessionDeleted: Row(410, "session_deleted"),
    BodyTooLarge: Row(413, "body_too_large", numbers=("max_bytes",)),
    UnsupportedMediaType: Row(415, "unsupported_media_type"),
    QueueFull: Row(429, "queue_full", numbers=("max_queue",), retry_after=1),
    Overloaded: Row(429, "queue_full", numbers=("max_bytes",), retry_after=1),
    TooManySessions: Row(429, "too_many_sessions", numbers=("max_sessions",), retry_after=10),
    Cancelled: Row(499, "cancelled"),
    StepFailed: Row(500, "internal_error"),
    EngineDown: Row(500, "internal_error"),
    Loading: Row(503, "loading", retry_after=2),
    Stalled: Row(503, "stalled", retry_after=10),
    NoRoom: Row(503, "no_room", numbers=("needed_bytes", "total_bytes"), retry_after=1),
    ShuttingDown: Row(503, "shutting_down", retry_after=5),
    Drained: Row(503, "shutting_down", retry_after=5),
}

_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def row_of(error: BaseException) -> Row:
    """The table's line for an error: its class's or its nearest ancestor's."""
    for ancestor in type(error).__mro__:
        if issubclass(ancestor, Exception) and ancestor in TABLE:
            return TABLE[ancestor]
    return FAULT


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it."""

    status: int
    error: dict[str, Any]
    retry_after: int | None = None

    @property
    def body(self) -> bytes:
        """The envelope, as JSON."""
        return orjson.dumps({"error": self.error})

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the content's own."""
        headers = {"cache-control": "no-store"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return headers


def problem(error: BaseException) -> Problem:
    """How an error is told: a known one by its message, a fault without details."""
    if isinstance(error, Blamed):
        return _problem(row_of(error.cause), error.cause, param=error.param)
    return _problem(row_of(error), error, param=getattr(error, "param", None))


def _problem(row: Row, error: BaseException, *, param: str | None) -> Problem:
    message = (
        "the server failed; the request id names its log lines" if row is FAULT else str(error)
    )
    numbers = {name: getattr(error, name) for name in row.numbers}
    envelope = {"message": message, "type": row.type, "param": param or row.param, "code": row.code}
    return Problem(row.status, envelope | numbers, row.retry_after)


def http_problem(status: int, detail: str) -> Problem:
    """The router's own refusals (unknown path, wrong method, unreadable body) in the envelope."""
    row = Row(status, _BY_STATUS.get(status, "invalid_request" if status < 500 else FAULT.code))
    envelope = {"message": detail, "type": row.type, "param": None, "code": row.code}
    return Problem(status, envelope)


def validation_problem(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """The first thing wrong with a body or a query, as a 400. The value itself is not repeated."""
    first = errors[0]
    where = first["loc"][1:]  # after "body" or "query"
    named = bool(where) and isinstance(where[0], str)
    param = (first.get("ctx") or {}).get("param") or (where[0] if named else None)
    message = f"{_path(where)}: {first['msg']}" if named else first["msg"]
    code = first["type"] if first["type"] in _FIELD_CODES else "invalid_request"
    envelope = {
        "message": _printable(message),
        "type": "invalid_request_error",
        "param": _printable(param) if param else None,
        "code": code,
    }
    return Problem(400, envelope)


_FIELD_CODES = frozenset({"empty_input", "not_supported"})


def _path(where: Sequence[str | int]) -> str:
    """`["token_ids", 3]` as `token_ids[3]`."""
    head, *rest = where
    return str(head) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest
    )


def _printable(text: str) -> str:
    """Names come from the client: keep them short, and free of lone surrogates."""
    return text.encode(errors="replace").decode()[:500]

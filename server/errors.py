"""One table from error classes to HTTP: status, type, code, param, numbers. Pure Python.

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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from embedding.errors import EmbeddingError, PositionOverflow, TextTooLong, TokenIdOutOfRange
from engine.errors import (
    BosNotAtStart,
    Cancelled,
    Drained,
    EditNotFinite,
    EditOutOfReach,
    EmptySession,
    EngineDown,
    NoRoom,
    PastLengthMismatch,
    PositionCommitted,
    PositionsOutOfRange,
    QueueFull,
    ReplyTooLarge,
    SessionBusy,
    SessionChanged,
    SessionDeleted,
    ShuttingDown,
    StepFailed,
    TooManyEdits,
)
from model.errors import TooManyPoints, UnknownPoint
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
    """The body is of no type that the route takes."""

    def __init__(self, *accepted: str) -> None:
        super().__init__(
            f"the body must be sent as Content-Type: {' or '.join(accepted)}, not encoded, "
            "and text in UTF-8"
        )


class BodyTooLarge(ServerError):
    """The body has more bytes than the server reads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        super().__init__(f"the body is larger than {max_bytes} bytes")


class AnswerTooLarge(ServerError):
    """One answer, or what it is made with, would hold more bytes than the server allows."""

    def __init__(
        self, *, n_bytes: int, max_bytes: int, param: str, what: str = "the answer"
    ) -> None:
        self.n_bytes = n_bytes
        self.max_bytes = max_bytes
        super().__init__(
            f"{what} would be {n_bytes} bytes, over the limit of {max_bytes}", param=param
        )


class Overloaded(ServerError):
    """The requests in flight hold as many bytes as they may, all together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        super().__init__(f"the requests in flight hold {max_bytes} bytes, which is the limit")


class ModelNotFound(ServerError):
    """Another model than the served one was asked for."""


class VectorNotFound(ServerError):
    """No vector of this id is kept."""

    def __init__(self, vector_id: str) -> None:
        super().__init__(f"no vector {vector_id[:80]!r} is kept here: send it with PUT /v1/vectors")


class VectorsFull(ServerError):
    """What is kept and what came would be more than may be kept."""

    def __init__(self, *, n_bytes: int, max_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.max_bytes = max_bytes
        super().__init__(
            f"the vectors would be {n_bytes} bytes, over the limit of {max_bytes}: delete some"
        )


class BudgetTooSmall(ServerError):
    """The K/V budget holds less than one full session."""


class Loading(ServerError):
    """The weights are not there yet."""


class Stalled(ServerError):
    """The model thread has shown no life for too long."""


class Blamed(ServerError):
    """`cause`, together with the field that caused it and the place in it, if it has several."""

    def __init__(self, cause: Exception, *, param: str, place: str = "") -> None:
        self.cause = cause
        super().__init__(f"{param}{place}: {cause}" if place else str(cause), param=param)


Kinds = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def blaming(param: str, kinds: Kinds = EmbeddingError, *, place: str = "") -> Iterator[None]:
    """Say of errors of these kinds inside, by default those about tokens, that `param` caused them.

    `place` is where in it: `[2].point`.
    """
    try:
        yield
    except kinds as error:
        raise Blamed(error, param=param, place=place) from error


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
    TooManyPoints: Row(400, "invalid_request", "points", ("max_names",)),
    InvalidRequest: Row(400, "invalid_request"),
    EmptyInput: Row(400, "empty_input"),
    NotSupported: Row(400, "not_supported"),
    EmptySession: Row(400, "empty_session"),
    PositionsOutOfRange: Row(
        400, "invalid_request", "points_at", ("position", "past_length", "n_new")
    ),
    PositionCommitted: Row(400, "position_committed", "interventions", ("position", "past_length")),
    EditOutOfReach: Row(
        400, "invalid_request", "interventions", ("position", "past_length", "n_new")
    ),
    EditNotFinite: Row(400, "invalid_request", "interventions"),
    BosNotAtStart: Row(400, "invalid_request", "prepend_bos", ("past_length",)),
    LengthOutOfRange: Row(400, "invalid_request", "to", ("past_length",)),
    ReplyTooLarge: Row(400, "response_too_large", "points", ("n_bytes", "max_bytes")),
    AnswerTooLarge: Row(400, "response_too_large", numbers=("n_bytes", "max_bytes")),
    SessionNotFound: Row(404, "session_not_found"),
    VectorNotFound: Row(404, "vector_not_found"),
    ModelNotFound: Row(404, "model_not_found", "model"),
    SessionBusy: Row(409, "session_busy", retry_after=1),
    PastLengthMismatch: Row(
        409, "past_length_mismatch", "past_length", ("expected", "past_length")
    ),
    SessionChanged: Row(409, "session_changed"),
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
    TooManyEdits: Row(507, "edits_full", "interventions", ("n_bytes", "max_bytes")),
    VectorsFull: Row(507, "vectors_full", numbers=("n_bytes", "max_bytes")),
}


def row_of(error: BaseException) -> Row:
    """The table's line for an error: its class's or its nearest ancestor's."""
    for ancestor in type(error).__mro__:
        if issubclass(ancestor, Exception) and ancestor in TABLE:
            return TABLE[ancestor]
    return FAULT

"""Errors as a client sees them: status, envelope, headers. Pure Python, the event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import FAULT, Blamed, Row, row_of

_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


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
        return _problem(row_of(error.cause), error.cause, str(error), param=error.param)
    return _problem(row_of(error), error, str(error), param=getattr(error, "param", None))


def _problem(row: Row, error: BaseException, message: str, *, param: str | None) -> Problem:
    if row is FAULT:
        message = "the server failed; the request id names its log lines"
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
    param = where[0] if named else (first.get("ctx") or {}).get("param")
    message = f"{_path(where)}: {first['msg']}" if named else first["msg"]
    code = "empty_input" if first["type"] == "empty_input" else "invalid_request"
    envelope = {
        "message": _printable(message),
        "type": "invalid_request_error",
        "param": _printable(param) if param else None,
        "code": code,
    }
    return Problem(400, envelope)


def _path(where: Sequence[str | int]) -> str:
    """`["token_ids", 3]` as `token_ids[3]`."""
    head, *rest = where
    return str(head) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest
    )


def _printable(text: str) -> str:
    """Names come from the client: keep them short, and free of lone surrogates."""
    return text.encode(errors="replace").decode()[:500]

"""Which form an answer takes: one JSON object, SSE or NDJSON. Pure Python, the event loop.

RFC 9110, section 12.5.1, as far as it matters here: the streaming types stream by themselves;
whatever else a client accepts is answered by JSON, unless the body says `stream: true`, which
means SSE.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Literal

from server.errors import NotSupported

EncodingFormat = Literal["base64", "float"]
"""How a tensor's numbers are written."""


class Form(Enum):
    """A form of an answer; the value is its media type."""

    JSON = "application/json"
    SSE = "text/event-stream"
    NDJSON = "application/x-ndjson"

    @property
    def streams(self) -> bool:
        """Whether records are sent as they come."""
        return self is not Form.JSON


SAFETENSORS_STREAM = "application/x-safetensors-stream"
_JSON_RANGES = frozenset({"*/*", "application/*", Form.JSON.value})
_KNOWN = frozenset({Form.SSE.value, Form.NDJSON.value, SAFETENSORS_STREAM}) | _JSON_RANGES


def negotiate(accept: str, *, stream: bool) -> Form:
    """The form for an `Accept` header (joined by commas) and the body's `stream`.

    Raises:
        NotSupported: the client prefers frames of safetensors.
    """
    preferred = _preferred(accept)
    if preferred == SAFETENSORS_STREAM:
        raise NotSupported(
            f"{SAFETENSORS_STREAM} is not supported by this version: "
            f"accept {Form.SSE.value} or {Form.NDJSON.value}",
            param="Accept",
        )
    if preferred in (Form.SSE.value, Form.NDJSON.value):
        return Form(preferred)
    return Form.SSE if stream else Form.JSON


def _preferred(accept: str) -> str | None:
    """The known type of the highest quality; of equals, the first."""
    ranked = [(quality, media) for media, quality in _ranges(accept) if media in _KNOWN and quality]
    return max(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _ranges(accept: str) -> Iterator[tuple[str, float]]:
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        yield media, _quality(parameters)


def _quality(parameters: list[str]) -> float:
    """The `q` parameter, 0 to 1; one that cannot be read counts as 1."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 1.0
    return 1.0

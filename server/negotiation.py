"""Which form an answer takes: JSON, a stream of records, raw tensors. Pure Python, the event loop.

RFC 9110, section 12.5.1, as far as it matters here: of the forms that a route has, the one that the
client prefers; whatever else it accepts is answered by JSON, unless the body says `stream: true`,
which means SSE.
"""

from collections.abc import Collection, Iterator
from enum import Enum
from typing import Literal

from server.errors import InvalidRequest

EncodingFormat = Literal["base64", "float"]
"""How a tensor's numbers are written in JSON."""


class Form(Enum):
    """A form of an answer; the value is its media type."""

    JSON = "application/json"
    SSE = "text/event-stream"
    NDJSON = "application/x-ndjson"
    FRAMES = "application/x-safetensors-stream"
    STACKED = "application/x-safetensors"

    @property
    def streams(self) -> bool:
        """Whether records are sent as they come."""
        return self in STREAMS

    @property
    def is_raw(self) -> bool:
        """Whether tensors are bytes of their own, outside any JSON."""
        return self in (Form.FRAMES, Form.STACKED)


STREAMS = (Form.SSE, Form.NDJSON, Form.FRAMES)
"""What every route has whose answer is records."""

_JSON_RANGES = frozenset({"*/*", "application/*", Form.JSON.value})


def negotiate(accept: str, *, stream: bool = False, forms: Collection[Form] = STREAMS) -> Form:
    """The form for an `Accept` header (joined by commas) and the body's `stream`.

    `forms` are those that the route has beside JSON; any other type is passed over.
    """
    offered = {form.value: form for form in forms}
    preferred = _preferred(accept, _JSON_RANGES | offered.keys())
    fallback = Form.SSE if stream else Form.JSON
    return offered.get(preferred or "", fallback)


def check_encoding(form: Form, encoding: EncodingFormat) -> None:
    """See that numbers are not wanted as text in a form that has them as bytes.

    Raises:
        InvalidRequest: they are.
    """
    if form.is_raw and encoding == "float":
        raise InvalidRequest(
            f"numbers are bytes in {form.value}: encoding_format is about JSON",
            param="encoding_format",
        )


def _preferred(accept: str, known: Collection[str]) -> str | None:
    """The known type of the highest quality; of equals, the first."""
    ranked = [(quality, media) for media, quality in _ranges(accept) if media in known and quality]
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

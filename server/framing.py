"""How the records of a stream become bytes. Any thread.

SSE      data: {...}       an event each; after `done` one more, [DONE]; `: ping` comments
NDJSON   {...}             a line each
frames   uint64 n | blob   n bytes of safetensors each; no pings
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.negotiation import EncodingFormat, Form
from server.tensors import frame
from server.wire import Message


@dataclass(frozen=True, slots=True)
class Framing:
    """One form's way to write."""

    encode: Callable[[Message], bytes]
    last: bytes = b""  # follows the `done` record
    ping: bytes = b""


def framing_of(form: Form, encoding: EncodingFormat) -> Framing:
    """The writer of a form that streams."""

    def event(message: Message) -> bytes:
        return b"data: " + message.json(encoding) + b"\n\n"

    def line(message: Message) -> bytes:
        return message.json(encoding) + b"\n"

    framings = {
        Form.SSE: Framing(event, last=b"data: [DONE]\n\n", ping=b": ping\n\n"),
        Form.NDJSON: Framing(line),
        Form.FRAMES: Framing(frame),
    }
    return framings[form]

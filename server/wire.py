"""What is told of sessions, tokens and steps, and its JSON. Any thread: nothing waits or changes.

A tensor in JSON is little-endian float32: base64 of its bytes (pybase64), or numbers that orjson
writes from the array itself, as the shortest text that reads back to the same float32.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from embedding.tokenizer import Tokenizer
from engine.events import StepRecord, Usage
from engine.views import SessionView
from model.config import GPT2Config
from model.points import Point
from server.facts import ModelFacts
from server.negotiation import EncodingFormat
from sessions.edits import Edit, Span

_LINE_BREAKS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
# From above; the longest token is 128 spaces, each of them " ", "Ġ" and 32 in its JSON.
_RECORD_BYTES = 1536  # a record's JSON without points and logprobs
_LOGPROB_BYTES = 1024  # one of its top_logprobs
_TENSOR_BYTES = 128  # what surrounds a tensor's data, but for its name
_SCALED = frozenset({"add", "scale", "project"})
_FLOAT_BYTES: Mapping[EncodingFormat, float] = {"base64": 4 * 4 / 3, "float": 16.0}


def _dumps(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def dumps(value: object) -> bytes:
    """JSON on one line. What some clients take for a line break is escaped."""
    data = _dumps(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


def session_json(view: SessionView, facts: ModelFacts) -> dict[str, Any]:
    """A session's state. Times are whole unix seconds."""
    session, n_ctx = view.session, facts.config.n_ctx
    parent = session.parent
    return {
        "id": session.id,
        "object": "session",
        "model": facts.name,
        "fingerprint": facts.fingerprint,
        "created": int(session.created),
        "expires": int(view.expires),
        "past_length": session.past_length,
        "n_ctx": n_ctx,
        "remaining": n_ctx - session.past_length,
        "parent": parent and {"id": parent.id, "past_length": parent.past_length},
        "kv": view.kv,
        "edits": len(session.edits),
        "record": list(session.record),
        "metadata": dict(session.metadata),
    }


def usage_json(usage: Usage) -> dict[str, Any]:
    """What a request cost."""
    return {
        "steps": usage.steps,
        "cached_tokens": usage.cached_tokens,
        "rebuilt_tokens": usage.rebuilt_tokens,
        "seed": usage.seed,
    }


def tensor_json(
    array: npt.NDArray[np.float32], axes: tuple[str, ...], encoding: EncodingFormat
) -> dict[str, Any]:
    """One tensor, saying what it is. What is not finite is null among `"float"` numbers."""
    if encoding == "base64":
        little = np.ascontiguousarray(array, dtype="<f4")
        data: object = pybase64.b64encode_as_string(little.data)
    else:
        data = np.ascontiguousarray(array, dtype=np.float32)
    return {"dtype": "float32", "shape": list(array.shape), "axes": list(axes), "data": data}


def edited_json(edits: Iterable[Edit]) -> list[dict[str, Any]]:
    """What was changed in a step, without the numbers; null for what an op does not have."""
    return [
        {
            "point": edit.point,
            "op": edit.op,
            "scale": edit.scale if edit.op in _SCALED else None,
            "keys": ",".join(map(_span_text, edit.keys)) or None,
            "sha256": edit.value and edit.value.sha256,
        }
        for edit in edits
    ]


def _span_text(span: Span) -> str:
    """As requests write it: `i`, `a:b` or `a:`."""
    first, stop = span
    if stop is None:
        return f"{first}:"
    return str(first) if stop == first + 1 else f"{first}:{stop}"


class Tensor(NamedTuple):
    """Numbers, and what each dimension counts. In JSON they are float32."""

    array: npt.NDArray[Any]
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A record on its way out, in no form yet: what it says, and its tensors by name.

    `tensors` None: it has no place for any, as the terminal record of a stream.
    """

    head: Mapping[str, Any]
    tensors: Mapping[str, Tensor] | None = None

    def json(self, encoding: EncodingFormat) -> bytes:
        """One JSON object, on one line; nothing in its tensors could be taken for a line break."""
        head = dumps(self.head)
        if self.tensors is None:
            return head
        points = {name: tensor_json(*tensor, encoding) for name, tensor in self.tensors.items()}
        return b"".join((head[:-1], b',"points":', _dumps(points), b"}"))


class Wire:
    """Tells what the engine reports, for one model."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._token = lru_cache(maxsize=8192)(self._token_fragment)

    def session(self, view: SessionView) -> dict[str, Any]:
        """See `session_json`."""
        return session_json(view, self._facts)

    def token(self, token_id: int) -> dict[str, Any]:
        """The bare facts of one token."""
        return {
            "id": token_id,
            "text": self._tokenizer.token_text(token_id),
            "piece": self._tokenizer.piece(token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def record(self, record: StepRecord) -> Message:
        """One step."""
        head = {
            "object": "step",
            "index": record.index,
            "position": record.position,
            "past_length": record.position + 1,
            "token": self._token(record.token_id),
            "text": record.text,
            "logprob": record.logprob,
            "top_logprobs": self._top_logprobs(record),
            "finish_reason": record.finish_reason,
            "stop_reason": record.stop_reason,
            "edited": edited_json(record.edits),
        }
        return Message(head, {str(p): Tensor(a, p.axes) for p, a in record.points.items()})

    def _top_logprobs(self, record: StepRecord) -> list[dict[str, Any]] | None:
        if record.top_logprobs is None:
            return None
        return [{**self.token(top.token_id), "logprob": top.logprob} for top in record.top_logprobs]

    def _token_fragment(self, token_id: int) -> orjson.Fragment:
        return orjson.Fragment(orjson.dumps(self.token(token_id)))


def record_bytes(
    points: tuple[Point, ...], config: GPT2Config, encoding: EncodingFormat, *, n_logprobs: int = 0
) -> int:
    """An estimate, from above, of one encoded record without edits and long held-back text.

    Of its JSON, and of its frame too, where numbers take less than in base64.
    """
    n_floats = sum(point.n_bytes(config) // 4 for point in points)
    around = sum(_TENSOR_BYTES + len(str(point)) for point in points)
    numbers = int(n_floats * _FLOAT_BYTES[encoding])
    return _RECORD_BYTES + n_logprobs * _LOGPROB_BYTES + around + numbers

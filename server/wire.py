"""What is told of sessions, tokens and steps, and its JSON. Any thread: nothing waits or changes.

A tensor in JSON is little-endian float32: base64 of its bytes (pybase64), or numbers that orjson
writes from the array itself, as the shortest text that reads back to the same float32. Either is
written slice by slice, because one call keeps every other thread from the interpreter.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
_SLICE = 3 * 2**14
"""Numbers that are written at once; their bytes are whole groups of base64."""


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

    def json(self, encoding: EncodingFormat) -> Iterator[bytes]:
        """It, saying what it is, in parts. What is not finite is null among `"float"` numbers."""
        about = {"dtype": "float32", "shape": self.array.shape, "axes": self.axes}
        yield _dumps(about)[:-1] + b',"data":'
        if encoding == "base64":
            yield from _base64(np.ascontiguousarray(self.array, dtype="<f4"))
        else:
            yield from _lists(np.ascontiguousarray(self.array, dtype=np.float32))
        yield b"}"


def _base64(array: npt.NDArray[np.float32]) -> Iterator[bytes]:
    numbers = array.reshape(-1)
    yield b'"'
    for at in range(0, array.size, _SLICE):
        yield pybase64.b64encode(numbers[at : at + _SLICE].data)
    yield b'"'


def _lists(array: npt.NDArray[np.float32]) -> Iterator[bytes]:
    if array.size <= _SLICE:
        yield _dumps(array)
        return
    n_rows = max(1, _SLICE * len(array) // array.size)
    before = b"["
    for at in range(0, len(array), n_rows):
        rows = array[at : at + n_rows]
        yield before
        yield from (_dumps(rows)[1:-1],) if rows.size <= _SLICE else _lists(rows[0])
        before = b","
    yield b"]"


@dataclass(frozen=True, slots=True)
class Message:
    """A record on its way out, in no form yet: what it says, and its tensors by name.

    `tensors` None: it has no place for any, as the terminal record of a stream. `beside`: tensors
    of other fields than `points`.
    """

    head: Mapping[str, Any]
    tensors: Mapping[str, Tensor] | None = None
    beside: Mapping[str, Mapping[str, Tensor] | None] = field(default_factory=dict)

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        """As a file has them: those of `points` by their names, others as `baseline/logits`."""
        others = {
            f"{group}/{name}": tensor
            for group, tensors in self.beside.items()
            for name, tensor in (tensors or {}).items()
        }
        return {**(self.tensors or {}), **others}

    def json(self, encoding: EncodingFormat) -> bytes:
        """One JSON object, on one line; nothing in its tensors could be taken for a line break."""
        return b"".join(self.json_parts(encoding))

    def json_parts(self, encoding: EncodingFormat) -> Iterator[bytes]:
        """The same in parts: joining them would hold a large one twice."""
        if self.tensors is None:
            yield dumps(self.head)
            return
        yield dumps(self.head)[:-1]
        for group, tensors in {"points": self.tensors, **self.beside}.items():
            yield b',"%s":' % group.encode()
            if tensors is None:
                yield b"null"
            else:
                yield from members({name: one.json(encoding) for name, one in tensors.items()})
        yield b"}"


def members(values: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON object, in parts, of values that are JSON in parts."""
    before = b"{"
    for name, parts in values.items():
        yield before + _dumps(name) + b":"
        yield from parts
        before = b","
    yield b"}" if values else b"{}"


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

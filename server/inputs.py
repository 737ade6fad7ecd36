"""From request fields to what the engine takes: ids, positions, points. The event loop.

Long texts are tokenized on a worker thread.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from embedding.tokenizer import Tokenizer
from engine.commands import Capture, ReplyLimit
from model.config import MAX_N_CTX, GPT2Config
from model.points import Selection, parse_points
from server.errors import InvalidRequest, blaming
from server.negotiation import EncodingFormat, Form, check_encoding
from server.schemas import Reporting, Tokens
from server.wire import record_bytes
from sessions.edits import Span, joined

TINY_TEXT = 4096
"""Characters; a text up to here is tokenized in about a quarter of a millisecond."""

_EDIT_BYTES = 192  # of an edit in a record, from above: its JSON without its name and its keys
_SPAN_BYTES = 12  # "1022:1023,"
_SPAN = re.compile(r"(?=[0-9:])([0-9]{0,9})(?::([0-9]{0,9}))?", re.ASCII)


def plain_int(text: object) -> object:
    """A query's number as it is written in the docs: digits, not `1.0`, `5_0` or ` 5`."""
    if isinstance(text, str) and not re.fullmatch(r"-?[0-9]{1,9}", text, re.ASCII):
        raise ValueError("should be a whole number in plain digits")
    return text


def check_token_ids(body: Tokens, tokenizer: Tokenizer) -> None:
    """See that the ids that a body gives are tokens. The body's own fault, so said first.

    Raises:
        Blamed: one is not.
    """
    with blaming("token_ids"):
        tokenizer.check_ids(body.token_ids or [])


async def token_ids_of(body: Tokens, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that a checked body gives; none if it gives neither text nor ids.

    Raises:
        Blamed: the text cannot fit.
    """
    if body.prompt is None:
        return tuple(body.token_ids or ())
    with blaming("prompt"):
        return tuple(await encode(tokenizer, body.prompt, allow_special=body.allow_special))


async def encode(tokenizer: Tokenizer, text: str, *, allow_special: bool) -> list[int]:
    """Tokenize, without keeping the event loop from its other work.

    Raises:
        TextTooLong: no tokenization of it fits.
    """

    def work() -> list[int]:
        return tokenizer.encode(text, allow_special=allow_special)

    return await asyncio.to_thread(work) if len(text) > TINY_TEXT else work()


def split_names(text: str) -> list[str]:
    """The names in a query's comma list. Commas in brackets belong to a name: `logits[3,5]`."""
    names: list[list[str]] = []
    depth = 0
    for part in text.split(","):
        if depth > 0:
            names[-1].append(part)
        else:
            names.append([part])
        depth += part.count("[") - part.count("]")
    return [",".join(parts) for parts in names]


def parse_positions(text: str, n_ctx: int, *, param: str = "points_at") -> frozenset[int]:
    """Absolute positions in a comma list of `i` or `a:b`, half-open.

    Raises:
        Blamed: it cannot be read, a range is empty, or it passes the context.
    """
    with blaming(param, InvalidRequest):
        spans = parse_spans(text, n_ctx, may_be_open=False)
    return frozenset(p for first, stop in spans for p in range(first, stop or n_ctx))


def committed_positions(text: str | None, past_length: int) -> list[int]:
    """The committed positions that a `positions` field names; None: all of them.

    Raises:
        InvalidRequest: it cannot be read, or names others.
    """
    if text is None:
        return list(range(past_length))
    positions = sorted(parse_positions(text, MAX_N_CTX, param="positions"))
    if positions[-1] >= past_length:
        raise InvalidRequest(
            f"position {positions[-1]} is not committed: past_length is {past_length}",
            param="positions",
        )
    return positions


def parse_spans(text: str, n_ctx: int, *, may_be_open: bool = True) -> tuple[Span, ...]:
    """Spans of a comma list of `i`, `a:b`, `a:`, `:b` or `:`, ordered, those that touch joined.

    Raises:
        InvalidRequest: it cannot be read, a range is empty, or it passes the context.
    """
    return joined(_span(part, n_ctx, may_be_open) for part in text.split(","))


def _span(part: str, n_ctx: int, may_be_open: bool) -> Span:
    match = _SPAN.fullmatch(part.strip())
    if match is None or (not may_be_open and "" in match.groups()):
        forms = "i, a:b, a: or :b" if may_be_open else "i or a:b"
        raise InvalidRequest(f"{part[:40]!r} is none of {forms}")
    first = int(match[1] or 0)
    stop = first + 1 if match[2] is None else int(match[2] or n_ctx)
    if not first < stop <= n_ctx:
        raise InvalidRequest(f"{part!r} is no range of positions 0 to {n_ctx - 1}")
    return first, None if match[2] == "" else stop


class Editing(Protocol):
    """What a record tells of an edit, as far as its length is concerned."""

    @property
    def point(self) -> object:
        """What is edited."""
        ...

    @property
    def keys(self) -> Sequence[Span]:
        """What a mask hides."""
        ...


def told_bytes(edits: Iterable[Editing]) -> int:
    """How long what a record tells of these is, from above."""
    return sum(_EDIT_BYTES + len(str(edit.point)) + _SPAN_BYTES * len(edit.keys) for edit in edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What to report of each step, in which form, and how large about a record is."""

    capture: Capture
    form: Form
    encoding: EncodingFormat
    names: Mapping[str, str]  # other systems' names that were asked for, to ours
    bytes_per_record: int
    bare_bytes_per_record: int  # of a record without points
    head: Mapping[str, Any] = field(default_factory=lambda: {"object": "steps"})  # of the answer

    @property
    def aliases(self) -> dict[str, Any]:
        """What an answer says of other systems' names, if any were asked for."""
        return {"aliases": dict(self.names)} if self.names else {}

    def with_edits(self, edits: Iterable[Editing]) -> "Report":
        """The same, its records listing these edits."""
        n_bytes = told_bytes(edits)
        return replace(
            self,
            bytes_per_record=self.bytes_per_record + n_bytes,
            bare_bytes_per_record=self.bare_bytes_per_record + n_bytes,
        )

    def limit(self, max_bytes: int, hold: Callable[[int], None]) -> ReplyLimit | None:
        """The bound of one JSON answer, whose bytes `hold` is told; a stream has none."""
        return None if self.form.streams else self.bound(max_bytes, hold)

    def bound(self, max_bytes: int, hold: Callable[[int], None]) -> ReplyLimit:
        """The bound of records that are held until the last one is there."""
        return ReplyLimit(
            bytes_per_record=self.bytes_per_record,
            bare_bytes_per_record=self.bare_bytes_per_record,
            max_bytes=max_bytes,
            hold=hold,
        )


def report_of(body: Reporting, form: Form, config: GPT2Config) -> Report:
    """What a body asks to be told.

    Raises:
        UnknownPoint, TooManyPoints: no such points.
        Blamed: `points_at` cannot be read.
    """
    selection = parse_points(body.points, config)
    positions = None if body.points_at is None else parse_positions(body.points_at, config.n_ctx)
    top_logprobs = body.top_logprobs if body.logprobs else None
    capture = Capture(points=selection.points, positions=positions, top_logprobs=top_logprobs)
    return new_report(selection, capture, form, body.encoding_format, config)


def new_report(
    selection: Selection,
    capture: Capture,
    form: Form,
    encoding: EncodingFormat,
    config: GPT2Config,
) -> Report:
    """A report, with estimates of its records' sizes.

    Raises:
        InvalidRequest: numbers as text, in a form that has them as bytes.
    """
    check_encoding(form, encoding)
    n_logprobs = 0 if capture.top_logprobs is None else capture.top_logprobs + 1
    bare = record_bytes((), config, encoding, n_logprobs=n_logprobs)
    full = record_bytes(capture.points, config, encoding, n_logprobs=n_logprobs)
    return Report(
        capture=capture,
        form=form,
        encoding=encoding,
        names=selection.aliases,
        bytes_per_record=full,
        bare_bytes_per_record=bare,
    )

"""From request fields to what the engine takes: ids, positions, points. The event loop.

Long texts are tokenized on a worker thread.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from embedding.tokenizer import Tokenizer
from engine.commands import Capture, ReplyLimit
from model.config import GPT2Config
from model.points import Selection, parse_points
from server.errors import InvalidRequest, blaming
from server.negotiation import EncodingFormat, Form
from server.schemas import Reporting, Tokens
from server.wire import record_bytes

TINY_TEXT = 4096
"""Characters; a text up to here is tokenized in about a quarter of a millisecond."""

_RANGE = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?", re.ASCII)


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


def parse_positions(text: str, n_ctx: int) -> frozenset[int]:
    """Absolute positions in a comma list of `i` or `a:b`, half-open.

    Raises:
        InvalidRequest: it cannot be read, a range is empty, or it passes the context.
    """
    bits = 0  # a thousand ranges may name each position a thousand times: one bit for each
    for part in text.split(","):
        span = _range(part.strip(), n_ctx)
        bits |= (1 << span.stop) - (1 << span.start)
    return frozenset(position for position in range(n_ctx) if bits >> position & 1)


def _range(part: str, n_ctx: int) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise InvalidRequest(f"{part[:40]!r} is neither i nor a:b", param="points_at")
    start = int(match[1])
    stop = start + 1 if match[2] is None else int(match[2])
    if not start < stop <= n_ctx:
        raise InvalidRequest(
            f"{part!r} is no range of positions 0 to {n_ctx - 1}", param="points_at"
        )
    return range(start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What to report of each step, in which form, and how large about a record is."""

    capture: Capture
    form: Form
    encoding: EncodingFormat
    names: Mapping[str, str]  # other systems' names that were asked for, to ours
    bytes_per_record: int
    bare_bytes_per_record: int  # of a record without points

    @property
    def aliases(self) -> dict[str, Any]:
        """What an answer says of other systems' names, if any were asked for."""
        return {"aliases": dict(self.names)} if self.names else {}

    def limit(self, max_bytes: int, hold: Callable[[int], None]) -> ReplyLimit | None:
        """The bound of one JSON answer, whose bytes `hold` is told; a stream has none."""
        if self.form.streams:
            return None
        return ReplyLimit(
            bytes_per_record=self.bytes_per_record,
            bare_bytes_per_record=self.bare_bytes_per_record,
            max_bytes=max_bytes,
            hold=hold,
        )


def report_of(body: Reporting, form: Form, config: GPT2Config) -> Report:
    """What a body asks to be told.

    Raises:
        UnknownPoint: a name that is no point.
        InvalidRequest: `points_at` cannot be read.
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
    """A report, with estimates of its records' sizes."""
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

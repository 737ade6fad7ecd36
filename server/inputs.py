"""From request fields to what the engine takes: ids, positions, points. The event loop.

Long texts are tokenized on a worker thread.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from embedding.tokenizer import Tokenizer
from engine.commands import Capture
from model.config import GPT2Config
from model.points import parse_points
from server.errors import InvalidRequest, blaming
from server.negotiation import Form
from server.schemas import Reporting, Tokens
from server.wire import EncodingFormat, record_bytes

TINY_TEXT = 4096
"""Characters; a text up to here is tokenized in about a quarter of a millisecond."""

_RANGE = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?", re.ASCII)


async def token_ids_of(body: Tokens, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that a body gives; none if it gives neither text nor ids.

    Raises:
        Blamed: the text is too long, or an id is no token.
    """
    if body.prompt is not None:
        with blaming("prompt"):
            return tuple(await encode(tokenizer, body.prompt, allow_special=body.allow_special))
    token_ids = body.token_ids or []
    with blaming("token_ids"):
        tokenizer.check_ids(token_ids)
    return tuple(token_ids)


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
    positions: set[int] = set()
    for part in text.split(","):
        positions.update(_range(part.strip(), n_ctx))
    return frozenset(positions)


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
    """What to report of each step, and in which form."""

    capture: Capture
    form: Form
    encoding: EncodingFormat
    aliases: Mapping[str, str]  # other systems' names that were asked for, to ours


def report_of(body: Reporting, form: Form, config: GPT2Config, *, max_bytes: int) -> Report:
    """What a body asks to be told. `max_bytes` bounds one JSON answer; a stream has no bound.

    Raises:
        UnknownPoint: a name that is no point.
        InvalidRequest: `points_at` cannot be read.
    """
    selection = parse_points(body.points, config)
    n_logprobs = body.top_logprobs + 1 if body.logprobs else 0
    estimate = partial(
        record_bytes, config=config, encoding=body.encoding_format, n_logprobs=n_logprobs
    )
    capture = Capture(
        points=selection.points,
        positions=None if body.points_at is None else parse_positions(body.points_at, config.n_ctx),
        top_logprobs=body.top_logprobs if body.logprobs else None,
        bytes_per_record=estimate(selection.points),
        bare_bytes_per_record=estimate(()),
        max_reply_bytes=None if form.streams else max_bytes,
    )
    return Report(
        capture=capture, form=form, encoding=body.encoding_format, aliases=selection.aliases
    )

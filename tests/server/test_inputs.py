import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding.errors import TextTooLong, TokenIdOutOfRange
from embedding.tokenizer import Tokenizer
from engine.errors import ReplyTooLarge
from model.config import SIZES
from model.errors import UnknownPoint
from model.points import Point
from server.errors import Blamed, InvalidRequest
from server.inputs import (
    check_token_ids,
    parse_positions,
    parse_spans,
    report_of,
    split_names,
    token_ids_of,
)
from server.negotiation import Form
from server.schemas import AppendBody, OpenBody
from server.wire import dumps, edited_json
from sessions.edits import Edit, Span, within

TINY = SIZES["tiny"]


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("0", {0}),
        ("1023", {1023}),
        ("2:4", {2, 3}),
        ("0,2:4, 3", {0, 2, 3}),
        ("0:1024", set(range(1024))),
        (",".join(["0:1024"] * 1170), set(range(1024))),
        ("5,3:6,5:9", {3, 4, 5, 6, 7, 8}),
    ],
)
def test_positions(text: str, positions: set[int]) -> None:
    assert parse_positions(text, 1024) == positions


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "1:", ":1", "1:1", "2:1", "1024", "0:1025", "1,", "1.0", "١", "9" * 12]
)
def test_positions_refused(text: str) -> None:
    for param in ("points_at", "positions"):
        with pytest.raises(Blamed) as raised:
            parse_positions(text, 1024, param=param)
        assert isinstance(raised.value.cause, InvalidRequest)
        assert raised.value.param == param


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("5", ((5, 6),)),
        ("10:", ((10, None),)),
        (":3", ((0, 3),)),
        (":", ((0, None),)),
        ("7, 2:4 ,4:5", ((2, 5), (7, 8))),
        ("8:,2:9,20", ((2, None),)),
        ("3,2,1,0", ((0, 4),)),
        (",".join(["0:1024"] * 1170), ((0, 1024),)),
    ],
)
def test_spans_are_ordered_and_joined(text: str, spans: tuple[Span, ...]) -> None:
    assert parse_spans(text, 1024) == spans


@pytest.mark.parametrize("text", ["", "-1", "::", "1:2:3", "1024:", ":0", ":1025", "4:4", "1,"])
def test_spans_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_spans(text, 1024)


@given(st.sets(st.integers(0, 63), min_size=1))
@settings(deadline=None, max_examples=50)
def test_spans_hold_what_was_named(positions: set[int]) -> None:
    spans = parse_spans(",".join(map(str, positions)), 64)
    assert {p for p in range(64) if within(spans, p)} == positions
    assert all(later[0] > before[1] for before, later in pairwise(spans) if before[1] is not None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", [""]),
        ("wte", ["wte"]),
        ("wte,,z.0", ["wte", "", "z.0"]),
        ("logits[318,262],z.9[6],ln_f", ["logits[318,262]", "z.9[6]", "ln_f"]),
        ("a[1,2", ["a[1,2"]),
        ("a],b", ["a]", "b"]),
        ("[" + "," * 30_000, ["[" + "," * 30_000]),
    ],
)
def test_commas_in_brackets_belong_to_names(text: str, names: list[str]) -> None:
    assert split_names(text) == names


@given(st.sets(st.integers(0, 1023), min_size=1))
@settings(deadline=None, max_examples=50)
def test_any_set_of_positions_can_be_written(positions: set[int]) -> None:
    assert parse_positions(",".join(map(str, positions)), 1024) == positions


async def _ids(tokenizer: Tokenizer, **body: object) -> tuple[int, ...]:
    return await token_ids_of(OpenBody.model_validate(body), tokenizer)


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({}, ()),
        ({"prompt": "Hello world"}, (15496, 995)),
        ({"token_ids": [0, 50256]}, (0, 50256)),
        ({"prompt": " "}, (220,)),  # C07
        ({"prompt": "<|endoftext|>"}, (27, 91, 437, 1659, 5239, 91, 29)),  # T01
        ({"prompt": "<|endoftext|>", "allow_special": True}, (50256,)),
        ({"prompt": "\ud83d"}, (4210,)),  # T02
        ({"prompt": "\ud83d\udc4d"}, (41840, 235)),
    ],
)
def test_token_ids(tokenizer: Tokenizer, body: dict[str, object], ids: tuple[int, ...]) -> None:
    assert asyncio.run(_ids(tokenizer, **body)) == ids


@pytest.mark.parametrize("text", [" " * 999_999 + "x", "😀" * 32_769])
def test_t04_text_that_cannot_fit_is_refused_by_size(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(Blamed) as raised:
        asyncio.run(_ids(tokenizer, prompt=text))
    assert isinstance(raised.value.cause, TextTooLong)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("bad", [-1, 50257, 2147483648, 9223372036854775808])
def test_t10_ids_outside_the_vocabulary(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(Blamed) as raised:
        check_token_ids(OpenBody(token_ids=[1, bad]), tokenizer)
    assert isinstance(raised.value.cause, TokenIdOutOfRange)
    assert raised.value.cause.index == 1
    assert raised.value.param == "token_ids"


def _append(**body: object) -> AppendBody:
    return AppendBody.model_validate({"prompt": "a", **body})


def test_report_by_default() -> None:
    report = report_of(_append(), Form.JSON, TINY)
    assert report.capture.points == (Point("embedding"),)
    assert report.capture.positions is None
    assert report.capture.top_logprobs is None
    held: list[int] = []
    limit = report.limit(9, held.append)
    assert limit is not None
    with pytest.raises(ReplyTooLarge):
        limit.take(n_records=1, n_full=0)
    assert held == []
    assert limit.max_bytes == 9
    assert limit.bytes_per_record == report.bytes_per_record > limit.bare_bytes_per_record
    assert report.encoding == "base64"
    assert report.aliases == {}


def test_a_stream_has_no_limit_of_bytes() -> None:
    assert report_of(_append(), Form.SSE, TINY).limit(9, lambda _: None) is None


def test_edits_take_room_in_every_record() -> None:
    report = report_of(_append(), Form.JSON, TINY)
    keys = tuple((2 * i, 2 * i + 1) for i in range(400))
    edit = Edit(point="scores.0", op="mask", keys=keys)
    told = len(dumps(edited_json([edit])))
    larger = report.with_edits([edit])
    assert larger.bytes_per_record - report.bytes_per_record >= told
    assert larger.bare_bytes_per_record - report.bare_bytes_per_record >= told
    assert report.with_edits([]) == report


def test_report_as_asked() -> None:
    body = _append(
        points=["resid_post.*", "hook_embed"], points_at="1:3", logprobs=True, top_logprobs=2
    )
    report = report_of(body, Form.NDJSON, TINY)
    assert [str(point) for point in report.capture.points] == [
        "wte",
        "resid_post.0",
        "resid_post.1",
    ]
    assert report.capture.positions == frozenset({1, 2})
    assert report.capture.top_logprobs == 2
    assert report.aliases == {"aliases": {"hook_embed": "wte"}}


def test_an_unknown_point_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownPoint, match="embedding"):
        report_of(_append(points=["embeding"]), Form.JSON, TINY)

"""How large a step is in each form: what docs/api.md says, from records."""

import re
from pathlib import Path

import numpy as np
import pytest

from embedding.tokenizer import Tokenizer
from engine.events import StepRecord
from model.config import SIZES
from model.points import parse_points
from server.framing import framing_of
from server.negotiation import EncodingFormat, Form
from server.wire import Wire
from tests.server.serving import facts_about

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
GPT2 = SIZES["gpt2"]
ROWS: dict[str, tuple[Form, EncodingFormat]] = {
    'SSE, `"base64"`': (Form.SSE, "base64"),
    'SSE, `"float"`': (Form.SSE, "float"),
    'NDJSON, `"base64"`': (Form.NDJSON, "base64"),
    'NDJSON, `"float"`': (Form.NDJSON, "float"),
    "frames": (Form.FRAMES, "base64"),
}


def n_bytes(tokenizer: Tokenizer, names: list[str], form: Form, encoding: EncodingFormat) -> int:
    """Of the step of " world" at position 100; its numbers are normal ones."""
    rng = np.random.default_rng(0)
    points = parse_points(names, GPT2).points
    rows = {point: rng.standard_normal(768, dtype=np.float32) for point in points}
    step = StepRecord(index=0, position=100, token_id=995, text=" world", points=rows)
    message = Wire(tokenizer, facts_about(GPT2)).record(step)
    return len(framing_of(form, encoding).encode(message))


@pytest.mark.parametrize("row", ROWS)
def test_the_documented_bytes_of_a_step_are_true(tokenizer: Tokenizer, row: str) -> None:
    match = re.search(rf"^\| {re.escape(row)} \| ([0-9,]+) \| ([0-9,]+) \|", DOCS, re.MULTILINE)
    assert match, row
    residuals = ["resid_pre.*", "resid_post.11"]
    told = [int(number.replace(",", "")) for number in match.groups()]
    assert told == [n_bytes(tokenizer, names, *ROWS[row]) for names in ([], residuals)]

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding.tokenizer import Tokenizer
from engine.events import StepRecord, TopLogprob
from model.config import SIZES, GPT2Config
from model.points import Point
from server.answers import Record
from server.negotiation import EncodingFormat
from server.wire import Wire, dumps, record_bytes, tensor_json
from tests.server.serving import facts_about

TINY = SIZES["tiny"]


def wire(tokenizer: Tokenizer, config: GPT2Config = TINY) -> Wire:
    facts = facts_about(config)
    return Wire(tokenizer, facts)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@settings(deadline=None, max_examples=50)
def test_both_encodings_are_lossless(numbers: list[float]) -> None:
    array = np.array(numbers, dtype=np.float32)
    as_base64 = json.loads(dumps(tensor_json(array, ("n_embd",), "base64")))
    as_floats = json.loads(dumps(tensor_json(array, ("n_embd",), "float")))
    decoded = np.frombuffer(base64.b64decode(as_base64["data"]), dtype="<f4")
    assert decoded.tobytes() == array.tobytes()
    assert np.array(as_floats["data"], dtype=np.float32).tobytes() == array.tobytes()


def test_a_tensor_says_what_it_is_and_may_be_a_view() -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    told = tensor_json(table.T, ("a", "b"), "base64")
    assert (told["dtype"], told["shape"], told["axes"]) == ("float32", [4, 3], ["a", "b"])
    data = np.frombuffer(base64.b64decode(told["data"]), dtype="<f4").reshape(4, 3)
    assert (data == table.T).all()
    assert json.loads(dumps(tensor_json(table.T, ("a", "b"), "float")))["data"] == data.tolist()


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\u0085", "\r\n\0\v", "😀", "…ࠨ"])
def test_s13_json_stays_on_one_line_for_every_reader(text: str) -> None:
    data = dumps({"text": text})
    assert json.loads(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1


@pytest.mark.parametrize("encoding", ["base64", "float"])
def test_record_has_exactly_the_documented_fields(
    tokenizer: Tokenizer, encoding: EncodingFormat
) -> None:
    record = StepRecord(
        index=1,
        position=7,
        token_id=222,
        text="😀",
        logprob=-1.5,
        top_logprobs=(TopLogprob(995, -0.5),),
        points={Point("resid_post", 1): np.ones(32, dtype=np.float32)},
        finish_reason="stop",
        stop_reason=198,
    )
    told = json.loads(dumps(wire(tokenizer).record(record, encoding)))
    assert set(told) == set(Record.model_fields)
    Record.model_validate(told, strict=True)
    assert told["past_length"] == 8
    assert told["token"] == {"id": 222, "text": "�", "piece": "Ģ", "bytes": [128]}
    assert told["top_logprobs"][0] == {
        "id": 995,
        "text": " world",
        "piece": "Ġworld",
        "bytes": list(b" world"),
        "logprob": -0.5,
    }
    assert list(told["points"]) == ["resid_post.1"]


def test_record_without_logprobs_says_null(tokenizer: Tokenizer) -> None:
    told = wire(tokenizer).record(StepRecord(index=0, position=0, token_id=0, text="!"), "float")
    assert told["logprob"] is None
    assert told["top_logprobs"] is None
    assert told["points"] == {}
    assert told["edited"] is False


@pytest.fixture(scope="module")
def longest(tokenizer: Tokenizer) -> int:
    """The token whose JSON is the longest of all."""
    told = wire(tokenizer)
    return max(range(tokenizer.n_vocab), key=lambda i: len(dumps(told.token(i))))


@pytest.mark.parametrize("n_logprobs", [0, 21])
def test_the_estimate_of_a_records_bytes_is_from_above_for_any_token(
    tokenizer: Tokenizer, longest: int, n_logprobs: int
) -> None:
    top = tuple(TopLogprob(longest, -10.334875915275457) for _ in range(n_logprobs))
    record = StepRecord(
        index=1023,
        position=1023,
        token_id=longest,
        text=tokenizer.token_text(longest),
        logprob=-10.334875915275457,
        top_logprobs=top,
        finish_reason="length",
        stop_reason=longest,
    )
    n_bytes = len(dumps(wire(tokenizer).record(record, "base64")))
    estimate = record_bytes((), TINY, "base64", n_logprobs=n_logprobs)
    assert n_bytes <= estimate <= 2 * n_bytes


@pytest.mark.parametrize(("encoding", "slack"), [("base64", 1.1), ("float", 1.6)])
def test_the_estimate_of_a_records_bytes_is_from_above_for_any_number(
    tokenizer: Tokenizer, encoding: EncodingFormat, slack: float
) -> None:
    config = SIZES["gpt2"]
    points = tuple(Point("resid_post", layer) for layer in range(config.n_layer))
    normal = np.random.default_rng(0).standard_normal((12, 768), dtype=np.float32)
    longest = np.full((12, 768), -1.1754944e-38, dtype=np.float32)
    for rows in (normal, longest):
        record = StepRecord(
            index=0, position=0, token_id=0, text="!", points=dict(zip(points, rows, strict=True))
        )
        n_bytes = len(dumps(wire(tokenizer, config).record(record, encoding)))
        assert n_bytes <= record_bytes(points, config, encoding) <= slack * n_bytes

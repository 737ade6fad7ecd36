import base64
import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding.tokenizer import Tokenizer
from engine.events import StepRecord, TopLogprob
from engine.views import SessionView
from model.config import SIZES, GPT2Config
from model.points import Point, all_points
from server.answers import Record, SessionState
from server.framing import framing_of
from server.negotiation import EncodingFormat, Form
from server.wire import Message, Tensor, Wire, dumps, record_bytes, session_json
from sessions.edits import Edit, Value
from sessions.session import Session
from tests.server.serving import facts_about

TINY = SIZES["tiny"]
ENCODINGS: list[EncodingFormat] = ["base64", "float"]
WRITERS = {
    (form, encoding): framing_of(form, encoding).encode
    for form in (Form.SSE, Form.NDJSON)
    for encoding in ENCODINGS
} | {(Form.FRAMES, "base64"): framing_of(Form.FRAMES, "base64").encode}


def wire(tokenizer: Tokenizer, config: GPT2Config = TINY) -> Wire:
    facts = facts_about(config)
    return Wire(tokenizer, facts)


def tensor_json(
    array: npt.NDArray[np.float32], axes: tuple[str, ...], encoding: EncodingFormat
) -> Any:
    return json.loads(b"".join(Tensor(array, axes).json(encoding)))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@settings(deadline=None, max_examples=50)
def test_both_encodings_are_lossless(numbers: list[float]) -> None:
    array = np.array(numbers, dtype=np.float32)
    as_base64 = tensor_json(array, ("n_embd",), "base64")
    as_floats = tensor_json(array, ("n_embd",), "float")
    decoded = np.frombuffer(base64.b64decode(as_base64["data"]), dtype="<f4")
    assert decoded.tobytes() == array.tobytes()
    assert np.array(as_floats["data"], dtype=np.float32).tobytes() == array.tobytes()


def test_a_tensor_says_what_it_is_and_may_be_a_view() -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    told = tensor_json(table.T, ("a", "b"), "base64")
    assert (told["dtype"], told["shape"], told["axes"]) == ("float32", [4, 3], ["a", "b"])
    data = np.frombuffer(base64.b64decode(told["data"]), dtype="<f4").reshape(4, 3)
    assert (data == table.T).all()
    assert tensor_json(table.T, ("a", "b"), "float")["data"] == data.tolist()


@pytest.mark.parametrize(
    "shape", [(0, 3), (100_000,), (1, 50_257), (3, 20_000, 2), (2, 1, 60_000), (90_000, 1), (3, 0)]
)
def test_a_large_tensor_is_written_in_slices(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for encoding in ENCODINGS:
        parts = list(Tensor(array, ("a", "b", "c")[: array.ndim]).json(encoding))
        assert max(map(len, parts)) <= 50_000 * 16  # of one call
        told = json.loads(b"".join(parts))
        assert told["shape"] == list(shape)
        data = told["data"]
        flat = np.frombuffer(base64.b64decode(data), "<f4") if encoding == "base64" else data
        again = np.array(flat, dtype=np.float32).reshape(shape)
        assert again.tobytes() == array.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_message_has_tensors_of_other_fields(encoding: EncodingFormat) -> None:
    one, two = (Tensor(np.full(2, n, np.float32), ("a",)) for n in (1, 2))
    message = Message({"at": 1}, {"p": one}, {"baseline": {"p": two, "q": one}, "source": None})
    told = json.loads(message.json(encoding))
    assert list(told) == ["at", "points", "baseline", "source"]
    assert told["source"] is None
    assert told["baseline"] == {
        name: tensor_json(*tensor, encoding) for name, tensor in (("p", two), ("q", one))
    }
    assert message.all_tensors == {"p": one, "baseline/p": two, "baseline/q": one}
    assert b"".join(message.json_parts(encoding)) == message.json(encoding)


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
    told = json.loads(wire(tokenizer).record(record).json(encoding))
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
    record = StepRecord(index=0, position=0, token_id=0, text="!")
    told = json.loads(wire(tokenizer).record(record).json("float"))
    assert told["logprob"] is None
    assert told["top_logprobs"] is None
    assert told["points"] == {}
    assert told["edited"] == []


def test_a_record_lists_its_edits_without_their_numbers(tokenizer: Tokenizer) -> None:
    value = Value((2,), np.array([1, 2], dtype="<f4").tobytes())
    edits = (
        Edit(point="resid_post.1", op="add", value=value, scale=4.0),
        Edit(point="z.1[0]", op="scale", scale=0.0),
        Edit(point="ln_f", op="replace", value=value),
        Edit(point="scores.0[1]", op="mask", keys=((0, 1), (3, 5), (7, None))),
    )
    record = StepRecord(index=0, position=9, token_id=0, text="!", edits=edits)
    told = json.loads(wire(tokenizer).record(record).json("base64"))
    Record.model_validate(told, strict=True)
    sha256 = hashlib.sha256(value.data).hexdigest()
    nothing = {"scale": None, "keys": None, "sha256": None}
    assert told["edited"] == [
        {**nothing, "point": "resid_post.1", "op": "add", "scale": 4.0, "sha256": sha256},
        {**nothing, "point": "z.1[0]", "op": "scale", "scale": 0.0},
        {**nothing, "point": "ln_f", "op": "replace", "sha256": sha256},
        {**nothing, "point": "scores.0[1]", "op": "mask", "keys": "0,3:5,7:"},
    ]


def test_a_session_counts_its_edited_steps() -> None:
    twice = (Edit(point="ln_f", op="scale", scale=0.0),) * 2
    session = Session(
        id="s", created=1.9, ttl_seconds=9, token_ids=(1, 2, 3), edits={0: twice, 2: twice}
    )
    told = session_json(SessionView(session, 10.9, "resident"), facts_about(TINY))
    SessionState.model_validate(told, strict=True)
    assert (told["edits"], told["past_length"], told["remaining"]) == (2, 3, 1021)


def test_n01_what_is_not_finite_is_null_as_float_and_itself_in_bytes() -> None:
    array = np.array([[1.5, -np.inf, np.nan]], dtype=np.float32)
    as_floats = tensor_json(array, ("n_head", "key"), "float")
    assert as_floats["data"] == [[1.5, None, None]]
    as_base64 = tensor_json(array, ("n_head", "key"), "base64")
    assert base64.b64decode(as_base64["data"]) == array.tobytes()


def test_the_shape_and_axes_of_every_point_are_told(tokenizer: Tokenizer) -> None:
    position = 3
    points = (*all_points(TINY), Point("z", 1, (1,)), Point("logits", None, (318, 262)))
    record = filled(points, TINY, position)
    message = wire(tokenizer).record(record)
    for encoding in ENCODINGS:
        told = json.loads(message.json(encoding))["points"]
        assert list(told) == [str(point) for point in points]
        for point in points:
            tensor = told[str(point)]
            assert tensor["shape"] == list(point.shape(TINY, position)), point
            assert tensor["axes"] == list(point.axes)
            assert len(tensor["axes"]) == len(tensor["shape"])
    assert told["lens.0"]["shape"] == [2, 10]
    assert told["ln_f_scale"]["shape"] == [1]
    assert told["scores.0"]["shape"] == [2, 4]
    assert told["z.1[1]"]["shape"] == [1, 16]


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
    message = wire(tokenizer).record(record)
    estimate = record_bytes((), TINY, "base64", n_logprobs=n_logprobs)
    for write in WRITERS.values():
        assert len(write(message)) <= estimate <= 2 * len(write(message))


@pytest.mark.parametrize("number", [None, -1.1754944e-38])
@pytest.mark.parametrize("points", ["resid_post.*", "*", "units"])
def test_the_estimate_of_a_records_bytes_is_from_above_for_any_number(
    tokenizer: Tokenizer, points: str, number: float | None
) -> None:
    config = TINY if points == "*" else SIZES["gpt2"]
    chosen = {
        "resid_post.*": tuple(Point("resid_post", layer) for layer in range(config.n_layer)),
        "*": tuple(p for p in all_points(config) if p.name != "logits"),
        "units": (Point("logits", None, tuple(range(10_000, 11_000))), Point("z", 3, (0,))),
    }[points]
    record = filled(chosen, config, config.n_ctx - 1, number)
    message = wire(tokenizer, config).record(record)
    for (form, encoding), write in WRITERS.items():
        n_bytes, estimate = len(write(message)), record_bytes(chosen, config, encoding)
        assert n_bytes <= estimate, (form, encoding)
        assert estimate <= 2.5 * n_bytes, (form, encoding)


def filled(
    points: tuple[Point, ...], config: GPT2Config, position: int, number: float | None = None
) -> StepRecord:
    """A record whose points hold `number`, or normal ones."""
    rng = np.random.default_rng(0)

    def array(point: Point) -> npt.NDArray[np.float32]:
        shape = point.shape(config, position)
        if number is None:
            return rng.standard_normal(shape, dtype=np.float32)
        return np.full(shape, number, dtype=np.float32)

    arrays = {point: array(point) for point in points}
    return StepRecord(index=0, position=position, token_id=0, text="!", points=arrays)

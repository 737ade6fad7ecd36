from collections.abc import Iterator

import orjson
import pytest

import embedding.errors
import engine.errors
import sessions.errors
from embedding.errors import PositionOverflow, TextTooLong, TokenIdOutOfRange, VocabularyCorrupt
from engine.errors import (
    Drained,
    EngineError,
    NoRoom,
    PastLengthMismatch,
    QueueFull,
    Refused,
    SessionBusy,
    ShuttingDown,
    StepFailed,
)
from model.errors import UnknownPoint
from server.errors import (
    FAULT,
    TABLE,
    Blamed,
    InvalidRequest,
    blaming,
    row_of,
)
from server.problems import http_problem, problem, validation_problem
from sessions.errors import LengthOutOfRange, LogError, SessionError, SessionNotFound


def _leaves(root: type[Exception]) -> Iterator[type[Exception]]:
    below = root.__subclasses__()
    if not below:
        yield root
    for child in below:
        yield from _leaves(child)


@pytest.mark.parametrize("leaf", [*_leaves(EngineError), *_leaves(SessionError)])
def test_every_error_has_a_line_or_is_a_fault_on_purpose(leaf: type[Exception]) -> None:
    assert leaf in TABLE or leaf is LogError


def test_refusals_are_no_faults() -> None:
    for leaf in _leaves(Refused):
        row = TABLE[leaf]
        assert row.status < 500 or row.status == 507 or row.retry_after


def test_busy_full_and_unavailable_say_when_to_come_back() -> None:
    for row in TABLE.values():
        if row.status in (429, 503) or row.code == "session_busy":
            assert row.retry_after


def test_a_subclass_takes_its_ancestors_line() -> None:
    class Closer(SessionNotFound):
        pass

    assert row_of(Closer("x")) is TABLE[SessionNotFound]
    assert row_of(ValueError()) is FAULT
    assert row_of(VocabularyCorrupt()) is FAULT


def test_context_length_exceeded_tells_the_numbers() -> None:
    told = problem(PositionOverflow(past_length=1000, n_new=25, n_ctx=1024))
    assert told.status == 400
    assert "maximum context length is 1024 tokens" in told.error["message"]
    assert told.error["code"] == "context_length_exceeded"
    assert told.error["type"] == "invalid_request_error"
    numbers = {name: told.error[name] for name in ("n_ctx", "past_length", "n_new")}
    assert numbers == {"n_ctx": 1024, "past_length": 1000, "n_new": 25}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PastLengthMismatch(expected=3, past_length=5), 409, "past_length_mismatch"),
        (SessionBusy("s"), 409, "session_busy"),
        (QueueFull(2), 429, "queue_full"),
        (NoRoom(needed_bytes=1, total_bytes=2), 503, "no_room"),
        (ShuttingDown(), 503, "shutting_down"),
        (Drained(), 503, "shutting_down"),
        (StepFailed("the model failed"), 500, "internal_error"),
        (UnknownPoint("embeding", nearest=["embedding"]), 400, "unknown_point"),
        (TextTooLong(n_bytes=9, max_bytes=8, n_ctx=1), 400, "context_length_exceeded"),
    ],
)
def test_codes(error: Exception, status: int, code: str) -> None:
    told = problem(error)
    assert (told.status, told.error["code"]) == (status, code)
    assert set(orjson.loads(told.body)["error"]) >= {"message", "type", "param", "code"}


def test_a_fault_tells_nothing_of_itself() -> None:
    told = problem(RuntimeError("secret prompt"))
    assert told.status == 500
    assert b"secret" not in told.body


def test_t10_an_id_of_any_size_can_be_told() -> None:
    error = TokenIdOutOfRange(index=3, token_id=2**70, n_vocab=50257)
    told = problem(Blamed(error, param="tokens"))
    assert told.error["param"] == "tokens"
    assert told.error["index"] == 3
    assert str(2**70) in told.error["message"]
    assert orjson.loads(told.body)


def test_blaming_names_the_field() -> None:
    with pytest.raises(Blamed) as raised, blaming("max_tokens"):
        raise PositionOverflow(past_length=0, n_new=1025, n_ctx=1024)
    assert problem(raised.value).error["param"] == "max_tokens"
    assert problem(raised.value).error["n_new"] == 1025
    with pytest.raises(ValueError), blaming("x"):
        raise ValueError


def test_blaming_can_be_about_another_kind_of_error() -> None:
    with pytest.raises(Blamed) as raised, blaming("at", LengthOutOfRange), blaming("prompt"):
        raise LengthOutOfRange(to=9, past_length=5)
    told = problem(raised.value).error
    assert (told["code"], told["param"], told["past_length"]) == ("invalid_request", "at", 5)


def test_blaming_a_place_in_a_list_names_it() -> None:
    with pytest.raises(Blamed) as raised, blaming("interventions", UnknownPoint, place="[2]"):
        raise UnknownPoint("zz", nearest=["z"])
    told = problem(raised.value).error
    assert told["message"].startswith("interventions[2]: unknown point 'zz'")
    assert (told["code"], told["param"]) == ("unknown_point", "interventions")
    with pytest.raises(Blamed) as raised, blaming("x", RuntimeError, place="[2]"):
        raise RuntimeError("secret prompt")
    assert b"secret" not in problem(raised.value).body


def test_the_servers_own_errors_name_their_field() -> None:
    assert problem(InvalidRequest("no", param="after")).error["param"] == "after"


def test_the_routers_refusals() -> None:
    assert http_problem(404, "Not Found").error["code"] == "not_found"
    assert http_problem(405, "Method Not Allowed").error["code"] == "method_not_allowed"
    assert http_problem(400, "bad").error["code"] == "invalid_request"
    assert http_problem(500, "bad").error["code"] == "internal_error"


def test_validation_errors_name_field_and_index_but_no_value() -> None:
    line = {"loc": ("body", "token_ids", 3), "msg": "not an integer", "type": "int_type"}
    told = validation_problem([{**line, "input": "secret"}])
    assert told.status == 400
    assert told.error["message"] == "token_ids[3]: not an integer"
    assert told.error["param"] == "token_ids"
    assert told.error["code"] == "invalid_request"
    assert b"secret" not in told.body


def test_what_is_wrong_inside_a_field_is_that_fields_fault() -> None:
    line = {"loc": ("body", "interventions", 3), "msg": "unknown field x", "type": "unknown_field"}
    told = validation_problem([{**line, "ctx": {"param": "x"}}])
    assert told.error["param"] == "interventions"
    assert told.error["message"] == "interventions[3]: unknown field x"


def test_a_name_that_is_no_unicode_can_be_told() -> None:
    line = {"loc": ("body",), "msg": "unknown field \ud83d", "type": "unknown_field"}
    told = validation_problem([{**line, "ctx": {"param": "\ud83d"}}])
    assert told.error["param"] == "?"
    assert orjson.loads(told.body)


def test_table_covers_only_errors_of_ours() -> None:
    modules = {"server.errors", "model.errors"}
    modules |= {module.__name__ for module in (embedding.errors, engine.errors, sessions.errors)}
    assert {kind.__module__ for kind in TABLE} == modules

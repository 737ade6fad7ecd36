from typing import Any

import pytest
from pydantic import ValidationError

from engine.limits import Limits
from server.loading import limits_of
from server.settings import KV_SHARE, Settings, explain, unknown_variables


def test_every_setting_has_an_environment_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_MAX_QUEUE", "7")
    monkeypatch.setenv("STEPSCOPE_KV_BUDGET", "2GiB")
    settings = Settings()
    assert (settings.max_queue, settings.kv_budget) == (7, 2 * 2**30)


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_PORT", "1")
    assert Settings(port=2).port == 2


def test_an_unknown_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_MAX_QUEU", "7")
    with pytest.raises(ValidationError, match="STEPSCOPE_MAX_QUEU"):
        Settings()


def test_unknown_variables_names_only_ours() -> None:
    environ = {"PATH": "x", "STEPSCOPE_PORT": "1", "STEPSCOPE_POTR": "1", "stepscope_b": ""}
    assert unknown_variables(environ) == ["STEPSCOPE_POTR", "stepscope_b"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STEPSCOPE_PORT", "65536"),
        ("STEPSCOPE_PORT", "http"),
        ("STEPSCOPE_KV_BUDGET", "lots"),
        ("STEPSCOPE_KV_BUDGET", "0"),
        ("STEPSCOPE_DTYPE", "float16"),
        ("STEPSCOPE_KV_DTYPE", "int8"),
        ("STEPSCOPE_BATCH_INVARIANT", "perhaps"),
        ("STEPSCOPE_GRACE_SECONDS", "-1"),
        ("STEPSCOPE_WRITE_TIMEOUT", "inf"),
        ("STEPSCOPE_SESSION_TTL", "604801"),
        ("STEPSCOPE_LOG_LEVEL", "loud"),
        ("STEPSCOPE_MODEL", ""),
    ],
)
def test_a_bad_value_is_explained_by_flag_and_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError) as raised:
        Settings()
    line = explain(raised.value)
    assert line.count("\n") == 0
    assert name in line
    assert f"--{name.removeprefix('STEPSCOPE_').lower().replace('_', '-')}" in line


@pytest.mark.parametrize(
    ("given", "kv_dtype"),
    [
        ({}, "float32"),
        ({"dtype": "float32", "kv_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "kv_dtype": "float32"}, "float32"),
        ({"dtype": "int8"}, "float32"),
        ({"dtype": "int8", "kv_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_kv_is_as_wide_as_the_model_unless_told(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], kv_dtype: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"STEPSCOPE_{name.upper()}", value)
    assert Settings().kv_dtype == kv_dtype


@pytest.mark.parametrize(
    "given", [{"dtype": "bfloat16"}, {"dtype": "int8"}, {"kv_dtype": "bfloat16"}]
)
def test_equal_bits_are_promised_in_float32_only(given: dict[str, Any]) -> None:
    assert Settings(batch_invariant=True).kv_dtype == "float32"
    with pytest.raises(ValidationError) as raised:
        Settings(batch_invariant=True, **given)
    assert "--batch-invariant needs --dtype float32" in explain(raised.value)


def test_the_engines_defaults_are_stated_once() -> None:
    assert limits_of(Settings()) == Limits()
    assert limits_of(Settings(max_rows=3)) == Limits(max_rows=3)


def test_defaults_fit_the_machine() -> None:
    settings = Settings()
    assert settings.threads >= 1
    assert settings.kv_budget >= 1
    assert 0 < KV_SHARE < 1
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("example", "http://example:9"),
    ],
)
def test_url(host: str, url: str) -> None:
    assert Settings(host=host, port=9).url == url

import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.fields import MAX_IDS, Body
from server.schemas import (
    AppendBody,
    DetokenizeBody,
    EmbedBody,
    ForkBody,
    GenerateBody,
    OpenBody,
    TokenizeBody,
    TruncateBody,
)


def read(model: type[Body], text: str) -> Any:
    return model.model_validate(json.loads(text))


def fault(model: type[Body], text: str) -> Any:
    with pytest.raises(ValidationError) as raised:
        read(model, text)
    return raised.value.errors(include_url=False)[0]


@pytest.mark.parametrize("value", ["true", '"5"', "1.5", "1.0", "null", "[1]", "NaN", "1e3"])
def test_t12_ids_are_strict_integers(value: str) -> None:
    error = fault(AppendBody, f'{{"token_ids": [1, {value}]}}')
    assert error["loc"] == ("token_ids", 1)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "true"])
def test_n03_numbers_are_finite_numbers(name: str, value: str) -> None:
    assert fault(GenerateBody, f'{{"{name}": {value}}}')["loc"] == (name,)


@pytest.mark.parametrize("value", ["-1", "-2", "0", '"5"', "true", "1.0", "9223372036854775808"])
def test_c11_max_tokens(value: str) -> None:
    assert fault(GenerateBody, f'{{"max_tokens": {value}}}')["loc"] == ("max_tokens",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", "0"),  # N05
        ("top_p", "1.01"),
        ("top_k", "0"),
        ("temperature", "100.5"),
        ("temperature", "-1e-9"),
        ("seed", "-1"),
        ("seed", "9223372036854775808"),
        ("stop", '[""]'),
        ("stop", "5"),
        ("stop", '["a", 5]'),
        ("stop", json.dumps(["x"] * 17)),
        ("stop", '"\\ud83d"'),
        ("logit_bias", '{"50257": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"1.0": 1}'),
        ("logit_bias", '{"\\u0663": 1}'),
        ("logit_bias", '{"1": 100.5}'),
        ("logit_bias", '{"1": NaN}'),
        ("logit_bias", '{"1": true}'),
        ("logit_bias", "[1]"),
        ("past_length", "-1"),
        ("points", '"embedding"'),
        ("points", "[1]"),
        ("points_at", "5"),
        ("encoding_format", '"xml"'),
        ("logprobs", "1"),
        ("top_logprobs", "21"),
        ("ignore_eos", '"yes"'),
        ("stream", "1"),
    ],
)
def test_generate_refuses(name: str, value: str) -> None:
    assert fault(GenerateBody, f'{{"{name}": {value}}}')["loc"][0] == name


def test_n04_smallest_temperatures_are_read() -> None:
    for text in ("0", "-0.0", "5e-324", "1e-38", "1e-4"):
        assert read(GenerateBody, f'{{"temperature": {text}}}').temperature >= 0


def test_explicit_nulls_are_defaults() -> None:
    nulls = json.dumps(dict.fromkeys(GenerateBody.model_fields))
    assert read(GenerateBody, nulls) == GenerateBody()
    assert read(AppendBody, '{"prompt": null, "token_ids": [1]}').given == "token_ids"


@pytest.mark.parametrize(
    "model", [OpenBody, AppendBody, GenerateBody, TruncateBody, ForkBody, EmbedBody, TokenizeBody]
)
def test_unknown_fields_are_refused_even_as_null(model: type[Body]) -> None:
    error = fault(model, '{"n_past": null}')
    assert error["type"] == "unknown_field"
    assert error["ctx"] == {"param": "n_past"}


@pytest.mark.parametrize(
    ("model", "text", "param"),
    [
        (AppendBody, '{"prompt": ""}', "prompt"),
        (AppendBody, '{"token_ids": []}', "token_ids"),
        (AppendBody, "{}", "prompt"),
        (AppendBody, '{"prompt": "a", "token_ids": [1]}', "token_ids"),
        (OpenBody, '{"prompt": ""}', "prompt"),
        (OpenBody, '{"prompt": "a", "token_ids": [1]}', "token_ids"),
        (ForkBody, '{"prompt": ""}', "prompt"),
        (ForkBody, '{"at": 1, "token_ids": []}', "token_ids"),
        (ForkBody, '{"prompt": "a", "token_ids": [1]}', "token_ids"),
        (EmbedBody, '{"token_ids": []}', "token_ids"),
    ],
)
def test_c08_empty_input(model: type[Body], text: str, param: str) -> None:
    error = fault(model, text)
    assert (error["type"], error["ctx"]["param"]) == ("empty_input", param)


@pytest.mark.parametrize(
    "text",
    ['{"\\ud83d": 1}', '{"metadata": {"\\ud83d": "x"}}', '{"metadata": {"\\ud83d": 1}}'],
)
def test_t02_errors_can_be_told_whatever_the_names(text: str) -> None:
    """pydantic cannot list an error whose place or context is no unicode."""
    assert fault(OpenBody, text)


@pytest.mark.parametrize("model", [OpenBody, AppendBody, ForkBody, EmbedBody])
def test_allow_special_is_about_a_prompt(model: type[Body]) -> None:
    error = fault(model, '{"token_ids": [1], "allow_special": true}')
    assert error["ctx"] == {"param": "allow_special"}
    assert read(model, '{"token_ids": [1], "allow_special": false}').given == "token_ids"


def test_tokenize_takes_no_field_that_would_do_nothing() -> None:
    text = '{"prompt": "a", "add_special_tokens": true}'
    assert fault(TokenizeBody, text)["ctx"] == {"param": "add_special_tokens"}


def test_opening_without_tokens_is_allowed() -> None:
    assert read(OpenBody, "{}").given is None


def test_top_logprobs_needs_logprobs() -> None:
    assert fault(GenerateBody, '{"top_logprobs": 1}')["ctx"] == {"param": "top_logprobs"}
    assert read(GenerateBody, '{"top_logprobs": 1, "logprobs": true}').top_logprobs == 1


def test_logit_bias_keys_become_ids() -> None:
    body = read(GenerateBody, '{"logit_bias": {"0": -100, "50256": 1.5}, "stop": "x"}')
    assert body.logit_bias == {0: -100.0, 50256: 1.5}
    assert body.stop == ["x"]


@pytest.mark.parametrize(
    "metadata", ['{"a": 1}', '{"a": "\\ud83d"}', json.dumps({str(i): "" for i in range(17)}), "[]"]
)
def test_metadata_is_a_few_strings(metadata: str) -> None:
    assert fault(OpenBody, f'{{"metadata": {metadata}}}')["loc"][0] == "metadata"


@pytest.mark.parametrize("ttl", ["0", "604801", "1.0"])
@pytest.mark.parametrize("model", [OpenBody, ForkBody])
def test_ttl(model: type[Body], ttl: str) -> None:
    assert fault(model, f'{{"ttl_seconds": {ttl}}}')["loc"] == ("ttl_seconds",)


@pytest.mark.parametrize("at", ["-1", "1.0", '"1"', "true", "[1]"])
def test_a_fork_is_at_a_length(at: str) -> None:
    assert fault(ForkBody, f'{{"at": {at}}}')["loc"] == ("at",)
    assert read(ForkBody, '{"at": null}') == ForkBody()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"replay": True}, "at"),
        ({"at": 0, "edits": "drop"}, "edits"),
        ({"at": 0, "edits": "keep"}, "edits"),
        ({"at": 0, "replay": False, "points": []}, "points"),
        ({"points": ["ln_f"], "logprobs": True}, "logprobs"),
        ({"interventions": []}, "interventions"),
        ({"points_at": "1"}, "points_at"),
        ({"encoding_format": "float"}, "encoding_format"),
        ({"stream": True}, "stream"),
    ],
)
def test_a_fork_without_steps_says_nothing_of_them(body: dict[str, Any], param: str) -> None:
    assert fault(ForkBody, json.dumps(body))["ctx"]["param"] == param


@pytest.mark.parametrize(
    ("body", "with_records"),
    [
        ({}, False),
        ({"at": 3, "past_length": 4, "ttl_seconds": 5, "metadata": {}}, False),
        ({"token_ids": [1]}, False),
        ({"token_ids": [1], "points": None, "logprobs": None}, False),
        ({"token_ids": [1], "points": []}, True),
        ({"token_ids": [1], "interventions": []}, True),
        ({"prompt": "a", "stream": False}, True),
        ({"at": 3, "replay": True}, True),
        ({"at": 3, "replay": True, "edits": "drop"}, True),
    ],
)
def test_a_fork_of_which_steps_are_told_has_records(
    body: dict[str, Any], with_records: bool
) -> None:
    assert read(ForkBody, json.dumps(body)).is_about_steps == with_records


def test_a_large_bad_body_makes_one_error() -> None:
    with pytest.raises(ValidationError) as raised:
        DetokenizeBody.model_validate({"tokens": ["x"] * MAX_IDS})
    assert raised.value.error_count() == 1
    with pytest.raises(ValidationError) as raised:
        OpenBody.model_validate({str(i): i for i in range(100_000)})
    assert raised.value.error_count() == 1

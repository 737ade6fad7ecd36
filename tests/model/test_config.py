"""model.config: sizes, and configurations that are honoured or refused."""

from typing import Any

import pytest

from model.config import SIZES, GPT2Config, from_huggingface, from_openai
from model.errors import ConfigError

# What the hub has for openai-community/gpt2.
GPT2_JSON: dict[str, object] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def test_sizes_are_those_of_table_2() -> None:
    shapes = {name: (size.n_layer, size.n_head, size.n_embd) for name, size in SIZES.items()}

    assert shapes == {
        "gpt2": (12, 12, 768),
        "gpt2-medium": (24, 16, 1024),
        "gpt2-large": (36, 20, 1280),
        "gpt2-xl": (48, 25, 1600),
        "tiny": (2, 2, 32),
    }
    assert {size.n_ctx for size in SIZES.values()} == {1024}
    assert {size.d_head for size in SIZES.values()} == {64, 16}


def test_n_params_of_the_published_models() -> None:
    assert SIZES["gpt2"].n_params == 124_439_808
    assert SIZES["gpt2-xl"].n_params == 1_557_611_200


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_vocab", 50258),
        ("n_ctx", 0),
        ("n_ctx", 1025),
        ("n_embd", 0),
        ("n_layer", 0),
        ("n_head", 0),
        ("n_head", 5),
        ("layer_norm_epsilon", 0.0),
        ("layer_norm_epsilon", float("nan")),
    ],
)
def test_w05_a_size_that_cannot_be_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        GPT2Config(**{key: value})

    assert caught.value.key == key


def test_the_hubs_own_configuration() -> None:
    assert from_huggingface(GPT2_JSON) == SIZES["gpt2"]


def test_an_absent_key_means_hugging_faces_default() -> None:
    assert from_huggingface({"model_type": "gpt2"}) == SIZES["gpt2"]


def test_other_names_of_a_size_are_read() -> None:
    raw: dict[str, object] = {
        "model_type": "gpt2",
        "max_position_embeddings": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "layer_norm_epsilon": 1e-6,
    }

    assert from_huggingface(raw) == GPT2Config(
        n_ctx=512, n_embd=64, n_layer=3, n_head=4, layer_norm_epsilon=1e-6
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt_neo"),
        ("model_type", None),
        ("vocab_size", 50304),
        ("n_positions", 2048),
        ("n_ctx", 512),  # n_positions says 1024
        ("n_layer", True),
        ("n_layer", "12"),
        ("n_layer", None),
        ("n_head", 12.0),
        ("n_inner", 1024),
        ("activation_function", "gelu"),
        ("activation_function", "relu"),
        ("scale_attn_weights", False),
        ("scale_attn_weights", 1),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModel": "theirs.Model"}),
        ("layer_norm_epsilon", "1e-5"),
    ],
)
def test_a_key_that_would_change_the_maths_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError):
        from_huggingface(GPT2_JSON | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_inner", 3072),
        ("n_inner", None),
        ("activation_function", "gelu_pytorch_tanh"),
        ("reorder_and_upcast_attn", True),
        ("pruned_heads", {}),
        ("torch_dtype", "float16"),
        ("use_cache", False),
    ],
)
def test_a_key_that_would_not_is_passed_over(key: str, value: object) -> None:
    assert from_huggingface(GPT2_JSON | {key: value}) == SIZES["gpt2"]


def test_openais_hparams() -> None:
    raw = {"n_vocab": 50257, "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24}

    assert from_openai(raw) == SIZES["gpt2-medium"]


@pytest.mark.parametrize("key", ["n_vocab", "n_ctx", "n_embd", "n_head", "n_layer"])
def test_openais_hparams_must_be_complete(key: str) -> None:
    raw = {"n_vocab": 50257, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}
    del raw[key]

    with pytest.raises(ConfigError, match=key):
        from_openai(raw)


def test_openais_hparams_with_an_unknown_key_are_refused() -> None:
    raw = {"n_vocab": 50257, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}

    with pytest.raises(ConfigError, match="attn_window"):
        from_openai(raw | {"attn_window": 256})

"""The shape of a GPT-2. Pure Python, any thread; no torch.

Key names of openai/gpt-2 (`src/model.py`, `default_hparams`) and of Hugging Face's `GPT2Config`.
A key that would change the maths is honoured or refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from model.errors import ConfigError

N_VOCAB = 50257
MAX_N_CTX = 1024


def _require(key: str, value: object, condition: bool, allowed: str) -> None:
    if not condition:
        raise ConfigError(key, value, allowed=allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Sizes of one model (Radford et al. 2019, table 2). The defaults are those of gpt2.

    Raises:
        ConfigError: a size that no GPT-2 has.
    """

    n_vocab: int = N_VOCAB
    n_ctx: int = MAX_N_CTX
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        _require("n_vocab", self.n_vocab, self.n_vocab == N_VOCAB, f"{N_VOCAB}")
        _require("n_ctx", self.n_ctx, 1 <= self.n_ctx <= MAX_N_CTX, f"1 to {MAX_N_CTX}")
        _require("n_layer", self.n_layer, self.n_layer >= 1, "at least 1")
        _require("n_embd", self.n_embd, self.n_embd >= 1, "at least 1")
        divides = self.n_head >= 1 and self.n_embd % self.n_head == 0
        _require("n_head", self.n_head, divides, f"a divisor of n_embd, {self.n_embd}")
        epsilon = self.layer_norm_epsilon
        _require("layer_norm_epsilon", epsilon, 0 < epsilon < 1, "between 0 and 1")

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def n_params(self) -> int:
        """Weights in all; the output matrix is the token table and counts once."""
        width = self.n_embd
        block = 12 * width * width + 13 * width
        return (self.n_vocab + self.n_ctx) * width + self.n_layer * block + 2 * width


SIZES: Mapping[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
    "tiny": GPT2Config(n_layer=2, n_head=2, n_embd=32),
}

# Hugging Face keys whose other values mean another model; absent keys have the first value.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one formula
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "auto_map": (None,),  # the model is somebody's own code
}

# Ours, then the names that Hugging Face uses for it; more than one may be present.
_HUGGINGFACE_SIZES: Mapping[str, tuple[str, ...]] = {
    "n_vocab": ("vocab_size",),
    "n_ctx": ("n_positions", "n_ctx", "max_position_embeddings"),
    "n_embd": ("n_embd", "hidden_size"),
    "n_layer": ("n_layer", "num_hidden_layers"),
    "n_head": ("n_head", "num_attention_heads"),
}

_OPENAI_KEYS = ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer")


def from_huggingface(raw: Mapping[str, object]) -> GPT2Config:
    """The configuration in a Hugging Face `config.json`.

    Dropout rates, generation settings and `reorder_and_upcast_attn` (a matter of precision) do
    not change the function and are passed over.

    Raises:
        ConfigError: naming the key, where the maths would be another.
    """
    _check_only(raw, "model_type", ("gpt2",), absent=None)
    for key, allowed in _ONLY.items():
        _check_only(raw, key, allowed, absent=allowed[0])
    sizes = {ours: _one_size(raw, names) for ours, names in _HUGGINGFACE_SIZES.items()}
    config = GPT2Config(
        **{key: size for key, size in sizes.items() if size is not None},
        layer_norm_epsilon=_number(raw, "layer_norm_epsilon", default=1e-5),
    )
    _check_only(raw, "n_inner", (None, 4 * config.n_embd), absent=None)
    return config


def from_openai(raw: Mapping[str, object]) -> GPT2Config:
    """The configuration in the `hparams.json` of openai/gpt-2.

    Raises:
        ConfigError: a key is missing, unknown or out of range.
    """
    for key in raw:
        _require(key, raw[key], key in _OPENAI_KEYS, f"absent: only {', '.join(_OPENAI_KEYS)}")
    sizes = {key: _whole(raw, key) for key in _OPENAI_KEYS}
    missing = [key for key, size in sizes.items() if size is None]
    _require("hparams", sorted(raw), not missing, f"complete: {', '.join(missing)} missing")
    return GPT2Config(**{key: size for key, size in sizes.items() if size is not None})


def _one_size(raw: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    """The size that `raw` gives under one or several of `names`; they must not disagree."""
    found = [(name, _whole(raw, name)) for name in names if name in raw]
    for name, size in found:
        _require(name, size, size == found[0][1], f"equal to {found[0][0]}, {found[0][1]}")
    return found[0][1] if found else None


def _whole(raw: Mapping[str, object], key: str) -> int | None:
    value = raw.get(key)
    if key not in raw:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ConfigError(key, value, allowed="a whole number")


def _number(raw: Mapping[str, object], key: str, *, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(key, value, allowed="a number")


def _check_only(
    raw: Mapping[str, object], key: str, allowed: tuple[object, ...], *, absent: object
) -> None:
    value = raw.get(key, absent)
    names = " or ".join(repr(choice) for choice in allowed)
    # `0 == False` and `1 == True`, so the type counts too.
    same = any(type(value) is type(choice) and value == choice for choice in allowed)
    _require(key, value, same, names)

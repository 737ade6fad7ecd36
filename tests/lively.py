"""Weights that would show a bug.

A freshly drawn GPT-2 repeats one token whatever its positions are, and so hides the classic bug.
With this noise, greedy decoding wanders over many ids, and restarting positions at 0 leads it
elsewhere (tests/model/test_lively.py holds it to that).
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from model.config import GPT2Config
from model.weights.checkpoint import Checkpoint, Shape, expected_shapes

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

WTE_STD, WPE_STD, REST_STD = 0.1, 0.3, 0.2
_FULL_STRENGTH_WIDTH = 64  # wider rows sum more terms; beyond this the blocks would saturate

SEED = 3  # lively at every size from 8 to 128 wide; not every seed is
SMALL = GPT2Config(n_ctx=64, n_embd=32, n_layer=2, n_head=2)


def lively_checkpoint(config: GPT2Config = SMALL, seed: int = SEED) -> Checkpoint:
    """Seeded lively weights."""
    generator = Generator().manual_seed(seed)
    tensors = {
        name: _noisy(name, shape, config, generator)
        for name, shape in expected_shapes(config).items()
    }
    return Checkpoint(config, tensors, f"lively:{seed}")


def save_lively(directory: Path, config: GPT2Config = SMALL, seed: int = SEED) -> Checkpoint:
    """Save the same weights as `transformers` does: config.json and model.safetensors."""
    checkpoint = lively_checkpoint(config, seed)
    in_transformers(checkpoint).save_pretrained(directory)
    return checkpoint


def in_transformers(checkpoint: Checkpoint) -> "GPT2LMHeadModel":
    """The same model in `transformers`, with plain attention."""
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    config = checkpoint.config
    model = GPT2LMHeadModel(
        TheirConfig(
            vocab_size=config.n_vocab,
            n_positions=config.n_ctx,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            layer_norm_epsilon=config.layer_norm_epsilon,
        )
    )
    model.transformer.load_state_dict(dict(checkpoint.tensors))
    model.set_attn_implementation("eager")
    model.train(False)
    return model


def _noisy(name: str, shape: Shape, config: GPT2Config, generator: Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator) * _std(name, len(shape), config)
    is_gain = ".ln_" in f".{name}" and name.endswith(".weight")
    return noise + 1 if is_gain else noise


def _std(name: str, n_dims: int, config: GPT2Config) -> float:
    if name.startswith(("wte", "wpe")):
        return WTE_STD if name.startswith("wte") else WPE_STD
    if n_dims == 1:
        return REST_STD
    return REST_STD * min(1.0, math.sqrt(_FULL_STRENGTH_WIDTH / config.n_embd))

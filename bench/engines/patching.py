"""The grid of a `Sweep` case by full uncached passes in transformers, with hooks.

Each cell is one row of a batch: the session's tokens, where a layer's input at one position is what
the source's tokens have there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from bench.cases import Sweep
from bench.load import patched_prompts

Pass = Callable[[], Tensor]  # logits [B, 2] of its cells


def one_by_one(model: GPT2LMHeadModel, case: Sweep) -> list[Pass]:
    """A pass for each cell, in the order of the grid [layer, position]."""
    return [
        partial(_patched, model, case, layer, source[:, [position]], [position])
        for layer, source in enumerate(_inputs(model, case))
        for position in range(case.n_tokens)
    ]


def by_layer(model: GPT2LMHeadModel, case: Sweep) -> list[Pass]:
    """A pass for each layer, with a row for each position."""
    positions = list(range(case.n_tokens))
    return [
        partial(_patched, model, case, layer, source, positions)
        for layer, source in enumerate(_inputs(model, case))
    ]


def _inputs(model: GPT2LMHeadModel, case: Sweep) -> list[Tensor]:
    """Each layer's input [1, T, C] of the source's tokens."""
    _, source = patched_prompts(case)
    ids = torch.tensor([source])
    out = model(ids, use_cache=False, logits_to_keep=1, output_hidden_states=True)
    return list(out.hidden_states[: model.config.n_layer])


def _patched(
    model: GPT2LMHeadModel, case: Sweep, layer: int, source: Tensor, positions: list[int]
) -> Tensor:
    """Logits [B, 2] after the last token; row i of the batch gets source[:, i] at positions[i]."""
    rows = range(len(positions))

    def patch(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args[0][rows, positions] = source[0]
        return args

    session, _ = patched_prompts(case)
    ids = torch.tensor([session] * len(positions))
    hook = model.transformer.h[layer].register_forward_pre_hook(patch)
    try:
        logits: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
    finally:
        hook.remove()
    return logits[:, -1, list(case.logits)]

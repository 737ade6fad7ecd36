"""A plain GPT-2: float32, uncached, one sequence at a time, nothing clever. The tests' oracle.

Written from Radford et al. 2019 and Vaswani et al. 2017, apart from the product, and itself
compared with `transformers` (tests/model/test_reference.py). `positions` is a parameter so that a
twin with the classic bug, which restarts positions at 0, can be run for comparison.

Shapes: T tokens, C width, H heads, D head width, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from model.weights.checkpoint import Checkpoint


def reference_points(
    checkpoint: Checkpoint, token_ids: Sequence[int], *, positions: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Every point of one uncached pass over `token_ids`, by canonical name, and k.l and v.l."""
    points = _hidden_points(checkpoint, token_ids, positions)
    points["logits"] = points["ln_f"] @ checkpoint.tensors["wte.weight"].T  # [T, V]
    return points


def reference_logits(
    checkpoint: Checkpoint, token_ids: Sequence[int], *, positions: Sequence[int] | None = None
) -> Tensor:
    """Logits [T, V] of one uncached pass."""
    return reference_points(checkpoint, token_ids, positions=positions)["logits"]


def reference_greedy(
    checkpoint: Checkpoint, prompt: Sequence[int], n_new: int, *, restart_positions: bool = False
) -> list[int]:
    """The next `n_new` greedy ids, each from a full pass.

    `restart_positions`: the classic bug. Every token after the prompt is embedded at position 0.
    """
    ids = list(prompt)
    for _ in range(n_new):
        late = len(ids) - len(prompt)
        positions = [*range(len(prompt)), *([0] * late)] if restart_positions else None
        last = _hidden_points(checkpoint, ids, positions)["ln_f"][-1]  # [C]
        ids.append(int((checkpoint.tensors["wte.weight"] @ last).argmax()))
    return ids[len(prompt) :]


def _hidden_points(
    checkpoint: Checkpoint, token_ids: Sequence[int], positions: Sequence[int] | None
) -> dict[str, Tensor]:
    weights, config = checkpoint.tensors, checkpoint.config
    rows = list(range(len(token_ids)) if positions is None else positions)
    points = {
        "wte": weights["wte.weight"][list(token_ids)],  # [T, C]
        "wpe": weights["wpe.weight"][rows],  # [T, C]
    }
    h = points["embedding"] = points["wte"] + points["wpe"]  # [T, C]
    for layer in range(config.n_layer):
        points[f"resid_pre.{layer}"] = h
        h = _block(checkpoint, layer, h, points)
        points[f"resid_post.{layer}"] = h
    points["ln_f"] = _layer_norm(checkpoint, "ln_f", h)
    return points


def _block(checkpoint: Checkpoint, layer: int, h: Tensor, points: dict[str, Tensor]) -> Tensor:
    h = h + _attention(checkpoint, layer, _layer_norm(checkpoint, f"h.{layer}.ln_1", h), points)
    x = _layer_norm(checkpoint, f"h.{layer}.ln_2", h)
    x = _gelu(_dense(checkpoint, f"h.{layer}.mlp.c_fc", x))  # [T, 4C]
    return h + _dense(checkpoint, f"h.{layer}.mlp.c_proj", x)  # [T, C]


def _attention(checkpoint: Checkpoint, layer: int, x: Tensor, points: dict[str, Tensor]) -> Tensor:
    n_tokens, d_head = len(x), checkpoint.config.d_head
    qkv = _dense(checkpoint, f"h.{layer}.attn.c_attn", x)  # [T, 3C]
    q, k, v = (part.reshape(n_tokens, -1, d_head) for part in qkv.chunk(3, dim=-1))  # [T, H, D]
    points[f"k.{layer}"], points[f"v.{layer}"] = k, v
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d_head)  # [H, T, T]
    later = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(diagonal=1)
    pattern = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    z = torch.einsum("hqk,khd->qhd", pattern, v).reshape(n_tokens, -1)  # [T, C]
    return _dense(checkpoint, f"h.{layer}.attn.c_proj", z)


def _dense(checkpoint: Checkpoint, name: str, x: Tensor) -> Tensor:
    return x @ checkpoint.tensors[f"{name}.weight"] + checkpoint.tensors[f"{name}.bias"]


def _layer_norm(checkpoint: Checkpoint, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    normalized = centred / (variance + checkpoint.config.layer_norm_epsilon).sqrt()
    return normalized * checkpoint.tensors[f"{name}.weight"] + checkpoint.tensors[f"{name}.bias"]


def _gelu(x: Tensor) -> Tensor:
    """The tanh form (Hendrycks and Gimpel 2016), as openai/gpt-2 has it."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

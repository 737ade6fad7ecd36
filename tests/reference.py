"""A plain GPT-2: float32, uncached, one sequence at a time, nothing clever. The tests' oracle.

Written from Radford et al. 2019 and Vaswani et al. 2017, apart from the product, and itself
compared with `transformers` (tests/model/test_reference.py). `positions` is a parameter so that a
twin with the classic bug, which restarts positions at 0, can be run for comparison.

`edits` are made where the points are computed, one token at a time, by arithmetic of its own.

Shapes: T tokens, C width, H heads, D head width, V vocabulary.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from model.weights.checkpoint import Checkpoint
from sessions.edits import Edit, StepEdits

_PER_HEAD = ("q", "k", "v", "scores", "pattern", "z", "head_out")


def reference_points(
    checkpoint: Checkpoint,
    token_ids: Sequence[int],
    *,
    positions: Sequence[int] | None = None,
    edits: Mapping[int, StepEdits] | None = None,
) -> dict[str, Tensor]:
    """Every point of one uncached pass over `token_ids`, by canonical name, each [T, ...].

    Rows of `scores` and `pattern` are [H, T], -inf and 0 at later keys; `lens.l` is the row [C]
    that the head would multiply. `edits` by place in `token_ids`.
    """
    rows = list(range(len(token_ids)) if positions is None else positions)
    points = _Pass(checkpoint, edits or {}).run(token_ids, rows)
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
        late = [0] * (len(ids) - len(prompt)) if restart_positions else range(len(prompt), len(ids))
        points = _Pass(checkpoint, {}).run(ids, [*range(len(prompt)), *late])
        ids.append(int((checkpoint.tensors["wte.weight"] @ points["ln_f"][-1]).argmax()))
    return ids[len(prompt) :]


class _Pass:
    """One pass, and what it saw."""

    def __init__(self, checkpoint: Checkpoint, edits: Mapping[int, StepEdits]) -> None:
        self._weights, self._config = checkpoint.tensors, checkpoint.config
        self._edits = edits
        self.points: dict[str, Tensor] = {}

    def run(self, token_ids: Sequence[int], positions: Sequence[int]) -> dict[str, Tensor]:
        wte = self._seen("wte", self._weights["wte.weight"][list(token_ids)])  # [T, C]
        wpe = self._seen("wpe", self._weights["wpe.weight"][list(positions)])  # [T, C]
        h = self._seen("embedding", wte + wpe)
        for layer in range(self._config.n_layer):
            h = self._block(layer, h)
            centred, scale = self._centred(h)
            self.points[f"lens.{layer}"] = self._gained("ln_f", centred / scale)
        self._layer_norm("ln_f", "ln_f", "", h)
        return self.points

    def _block(self, layer: int, h: Tensor) -> Tensor:
        own = f".{layer}"
        h = self._seen("resid_pre" + own, h)
        x = self._layer_norm(f"h.{layer}.ln_1", "ln_1", own, h)
        h = self._seen("resid_mid" + own, h + self._attention(layer, x))
        x = self._layer_norm(f"h.{layer}.ln_2", "ln_2", own, h)
        x = self._seen("mlp_pre" + own, self._dense(f"h.{layer}.mlp.c_fc", x))  # [T, 4C]
        x = self._seen("mlp_post" + own, _gelu(x))
        x = self._seen("mlp_out" + own, self._dense(f"h.{layer}.mlp.c_proj", x))  # [T, C]
        return self._seen("resid_post" + own, h + x)

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        n_tokens, d_head, own = len(x), self._config.d_head, f".{layer}"
        qkv = self._dense(f"h.{layer}.attn.c_attn", x)  # [T, 3C]
        parts = (part.reshape(n_tokens, -1, d_head) for part in qkv.chunk(3, dim=-1))  # [T, H, D]
        q, k, v = (self._seen(name + own, part) for name, part in zip("qkv", parts, strict=True))
        scores = torch.einsum("qhd,khd->qhk", q, k) / math.sqrt(d_head)  # [T, H, T]
        later = torch.ones(n_tokens, 1, n_tokens, dtype=torch.bool)
        later[:, 0] = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(diagonal=1)
        scores = self._seen("scores" + own, scores.masked_fill(later, -math.inf))
        pattern = self._seen("pattern" + own, scores.softmax(dim=-1))
        z = self._seen("z" + own, torch.einsum("qhk,khd->qhd", pattern, v))
        output = self._weights[f"h.{layer}.attn.c_proj.weight"].view(-1, d_head, len(x[0]))
        heads = self._seen("head_out" + own, torch.einsum("qhd,hdc->qhc", z, output))  # [T, H, C]
        out = heads.sum(dim=1) + self._weights[f"h.{layer}.attn.c_proj.bias"]
        return self._seen("attn_out" + own, out)

    def _dense(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

    def _layer_norm(self, key: str, name: str, own: str, x: Tensor) -> Tensor:
        centred, scale = self._centred(x)
        scale = self._seen(f"{name}_scale{own}", scale)
        normalized = self._seen(f"{name}_normalized{own}", centred / scale)
        return self._seen(name + own, self._gained(key, normalized))

    def _centred(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer norm makes of x [T, C] before it divides, and by what [T, 1]."""
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return centred, (variance + self._config.layer_norm_epsilon).sqrt()

    def _gained(self, key: str, normalized: Tensor) -> Tensor:
        return normalized * self._weights[f"{key}.weight"] + self._weights[f"{key}.bias"]

    def _seen(self, name: str, x: Tensor) -> Tensor:
        """x [T, ...], edited and noted."""
        x = x.clone()
        for token, edits in self._edits.items():
            for edit in edits:
                match = re.fullmatch(r"([^\[]+)(?:\[([0-9,]+)\])?", edit.point)
                assert match
                if match[1] == name:
                    _edit(name.split(".")[0], x[token], token, edit, match[2])
        self.points[name] = x
        return x


def _edit(kind: str, row: Tensor, token: int, edit: Edit, units: str | None) -> None:
    """Change one token's row of a point in place."""
    if kind in ("scores", "pattern"):
        row = row[:, : token + 1]
    axis = 0 if kind in _PER_HEAD else row.dim() - 1
    chosen = [int(unit) for unit in units.split(",")] if units else list(range(row.shape[axis]))
    own = row.transpose(0, axis)  # units first
    own[chosen] = _changed(row.index_select(axis, torch.tensor(chosen)), edit).transpose(0, axis)


def _changed(x: Tensor, edit: Edit) -> Tensor:
    if edit.op == "mask":
        for first, stop in edit.keys:
            x[:, first : len(x[0]) if stop is None else stop] = -math.inf
        return x
    if edit.value is None:
        return edit.scale * x
    value = torch.tensor(np.frombuffer(edit.value.data, "<f4").reshape(edit.value.shape))
    if edit.op == "replace":
        return value
    if edit.op == "add":
        return x + edit.scale * value
    direction = value / value.square().sum().sqrt()
    return x + (edit.scale - 1) * (x * direction).sum() * direction


def _gelu(x: Tensor) -> Tensor:
    """The tanh form (Hendrycks and Gimpel 2016), as openai/gpt-2 has it."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

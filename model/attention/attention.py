"""One layer's attention: keys and values into the cache, then queries over it. The model thread.

Keys and values are read from the cache only, so a token sees itself and everything before it,
whoever computed it. The points of attention have the bits that are used: those of the cache.

Legend: N tokens of the batch, n of a part of it, H heads, D head width, C = H * D.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cache.accounting import KV
from cache.buffers import KVBuffers
from model.attention.explicit import ExplicitAttention
from model.attention.plan import Group, Plan, Planner
from model.hooks import Hooks, Part


class Kernel(Protocol):
    """How groups of queries are answered."""

    @property
    def max_queries(self) -> int:
        """Queries of one session's chunk that a group may have."""
        ...

    def __call__(self, layer: int, q: Tensor, groups: Sequence[Group]) -> Tensor:
        """Q [N, H, D] -> z [N, H, D], in the precision of the buffers."""
        ...


class Attention:
    """Attention over one model's buffers."""

    def __init__(self, buffers: KVBuffers, kernel: Kernel) -> None:
        self.plan = Planner(buffers, kernel.max_queries)
        self._buffers = buffers
        self._kernel = kernel
        self._explicit = ExplicitAttention(buffers)

    def __call__(self, layer: int, qkv: Tensor, plan: Plan, hooks: Hooks) -> Tensor:
        """Store this layer's keys and values, then attend. qkv [N, 3C] -> z [N, H, D]."""
        shape = self._buffers.shape
        rows = qkv.view(-1, 3, shape.n_head, shape.d_head).to(shape.dtype)
        q, k, v = rows.unbind(1)
        if plan.again:
            self._recall(layer, k, v, plan)
        hooks.at("q", layer, q)
        hooks.at("k", layer, k)
        hooks.at("v", layer, v)
        self._buffers.store(layer, plan.rows[plan.written], rows[plan.written, 1:])
        z = self._kernel(layer, q, plan.groups)
        part = hooks.part(layer, "scores", "pattern")
        if part:
            self._explain(layer, q, z, plan, part, hooks)
        z = z.to(qkv.dtype)
        hooks.at("z", layer, z)
        return z

    def _recall(self, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Keys and values of what is read again are those in the cache."""
        slots, positions = plan.slots[plan.again], plan.positions[plan.again]
        k[plan.again] = self._buffers.keys[layer, slots, :, positions]
        v[plan.again] = self._buffers.values[layer, slots, :, positions]

    def _explain(
        self, layer: int, q: Tensor, z: Tensor, plan: Plan, part: Part, hooks: Hooks
    ) -> None:
        """Show scores and pattern of `part`; where they are edited, z [N, H, D] is made of them."""
        edited = set(part.changed)
        for kv, tokens in self._slices(plan, part.tokens):
            positions = plan.positions[tokens].tolist()
            groups = self.plan.reads(kv, positions)
            scores, reads = self._explicit.scores(layer, q[tokens].float(), groups)
            hooks.at_keys("scores", layer, scores, tokens, positions)
            pattern = torch.softmax(scores, dim=2)
            hooks.at_keys("pattern", layer, pattern, tokens, positions)
            places = [place for place, token in enumerate(tokens) if token in edited]
            if places:
                own = self._explicit.values(layer, pattern, reads)
                z[[tokens[place] for place in places]] = own[places].to(z.dtype)

    def _slices(self, plan: Plan, tokens: Sequence[int]) -> Iterator[tuple[KV, Sequence[int]]]:
        """Tokens of one session at a time, so few that their scores stay small."""
        size = self._explicit.max_queries
        for kv, own in plan.sessions(tokens):
            yield from ((kv, own[i : i + size]) for i in range(0, len(own), size))

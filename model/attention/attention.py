"""One layer's attention: keys and values into the cache, then queries over it. The model thread.

Keys and values are read from the cache only, so a token sees itself and everything before it,
whoever computed it.

Legend: N tokens of the batch, H heads, D head width, C = H * D.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cache.buffers import KVBuffers
from model.attention.plan import Group, Plan, Planner


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

    def __call__(self, layer: int, qkv: Tensor, plan: Plan) -> Tensor:
        """Store this layer's keys and values, then attend. qkv [N, 3C] -> z [N, C]."""
        shape = self._buffers.shape
        rows = qkv.view(-1, 3, shape.n_head, shape.d_head).to(shape.dtype)
        self._buffers.store(layer, plan.rows, rows[:, 1:])
        z = self._kernel(layer, rows[:, 0], plan.groups)
        return z.reshape(len(rows), -1).to(qkv.dtype)

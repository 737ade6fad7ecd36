"""Attention in torch's fused kernel. Torch; the model thread.

Queries that read one run get their answer from one call. Where the keys lie in several runs, each
is attended to by itself and the parts are merged by the logarithm of their sums of weights, in
float32: softmax over all keys is the parts' softmaxes, weighted by exp(part - total) (Milakov and
Gimelshein 2018; Dao et al. 2022, section 3.1).

Source: Radford et al. 2019; openai/gpt-2 `src/model.py`, `attn` and `mask_attn_weights`.
Legend: N tokens of the batch, n queries of a group, H heads, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cache.buffers import KVBuffers
from model.attention.plan import Group


class FusedAttention:
    """Queries over the keys and values of one model's buffers."""

    def __init__(self, buffers: KVBuffers) -> None:
        self._buffers = buffers
        self.max_queries = buffers.shape.n_ctx  # any: the kernel tiles them itself

    def __call__(self, layer: int, q: Tensor, groups: Sequence[Group]) -> Tensor:
        """Q [N, H, D] -> z [N, H, D], in the precision of the buffers."""
        if len(groups) == 1:
            return self._whole(layer, q, groups[0])
        z = torch.empty_like(q, memory_format=torch.contiguous_format)
        partial = [group for group in groups if not group.whole]
        if partial:
            z = self._merged(layer, q, partial)
        for group in groups:
            if group.whole:
                z[group.queries] = self._whole(layer, q, group)
        return z

    def _whole(self, layer: int, q: Tensor, group: Group) -> Tensor:
        z = scaled_dot_product_attention(
            _arranged(q, group),
            *self._read(layer, group),
            attn_mask=None if group.causal else group.mask,
            is_causal=group.causal,  # torch aligns it to the upper left: right where it is square
        )
        return _flat(z, group)

    def _merged(self, layer: int, q: Tensor, groups: Sequence[Group]) -> Tensor:
        z = torch.zeros(q.shape, dtype=torch.float32)
        weight = torch.full(q.shape[:2], -torch.inf)  # [N, H], logarithm of the sum so far
        for group in groups:
            part, part_weight = self._part(layer, q, group)
            before, rows = weight[group.queries], group.queries
            total = torch.logaddexp(before, part_weight)
            kept, added = (before - total).exp_(), (part_weight - total).exp_()
            z[rows] = z[rows] * kept.unsqueeze(-1) + part * added.unsqueeze(-1)
            weight[rows] = total
        return z.to(q.dtype)

    def _part(self, layer: int, q: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Attention to one run alone: [n, H, D], and the logarithm of its sum of weights [n, H]."""
        z, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _arranged(q, group),
            *self._read(layer, group),
            attn_mask=None if group.causal else group.mask,
            is_causal=group.causal,
        )
        return _flat(z, group), _flat(weight.unsqueeze(-1), group).squeeze(-1)

    def _read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values [n_slots, H, stop - start, D]."""
        slots = slice(group.slot, group.slot + group.n_slots)
        keys = self._buffers.keys[layer, slots, :, group.start : group.stop]
        return keys, self._buffers.values[layer, slots, :, group.start : group.stop]


def _arranged(q: Tensor, group: Group) -> Tensor:
    """A group's queries as its slots are: [n_slots, H, n / n_slots, D]."""
    own = q[group.queries]  # [n, H, D]
    return own.unsqueeze(2) if group.n_slots == group.n else own.transpose(0, 1).unsqueeze(0)


def _flat(z: Tensor, group: Group) -> Tensor:
    """The inverse of `_arranged`: [n, H, ...]."""
    return z.squeeze(2) if group.n_slots == group.n else z[0].transpose(0, 1)

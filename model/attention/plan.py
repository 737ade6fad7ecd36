"""Causal attention of ragged rows over the cache. Torch; the model thread.

A batch is flattened: first one token of each decoding session, in order of slot, then the chunks
of those that step several tokens. Keys and values go into the cache first and are read from there,
so a token sees itself and everything before it, whoever computed it.

Decoding sessions in neighbouring slots are read in one call, masked to their own lengths, where
that pads little; a chunk is one call. The mask is one absolute table: query position q sees key
positions <= q, so a chunk's mask is aligned to the lower right whatever its past is.

Source: Radford et al. 2019; openai/gpt-2 `src/model.py`, `attn` and `mask_attn_weights`.
Legend: N tokens of the batch, n rows of a span, S slots, H heads, D head width, C = H * D.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cache.buffers import KVBuffers
from model.batch import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Decoding rows of neighbouring slots: flattened rows `first`.. at slots `slot`.."""

    first: int
    slot: int
    n: int
    longest: int
    mask: Tensor | None  # [n, 1, 1, longest]; None where all are equally long


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Several tokens of one session: flattened rows `first`.. at positions `past_length`.."""

    first: int
    slot: int
    past_length: int
    n_new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the flattened tokens of one batch read and write."""

    spans: tuple[Span, ...]
    chunks: tuple[Chunk, ...]
    slots: Sequence[int]  # [N]
    positions: Sequence[int]  # [N]
    rows: npt.NDArray[np.int64]  # [N, 2, H], see `KVBuffers.rows_of`


class Attention:
    """Attention over one model's buffers."""

    def __init__(self, buffers: KVBuffers) -> None:
        shape = buffers.shape
        self._buffers = buffers
        self._n_head = shape.n_head
        self._d_head = shape.d_head
        hidden = torch.full((shape.n_ctx, shape.n_ctx), -torch.inf, dtype=shape.dtype)
        self._causal = hidden.triu_(1)  # [query position, key position]

    def plan(self, rows: Sequence[Row]) -> Plan:
        """How to attend for `rows`: decoding ones first, by slot, then chunks."""
        n_decoding = sum(len(row.token_ids) == 1 for row in rows)
        slots = [row.kv.slot for row in rows for _ in row.token_ids]
        positions = [p for row in rows for p in row.positions]
        return Plan(
            spans=tuple(self._spans(rows[:n_decoding])),
            chunks=tuple(_chunks(rows[n_decoding:], n_decoding)),
            slots=slots,
            positions=positions,
            rows=self._buffers.rows_of(slots, positions),
        )

    def _spans(self, rows: Sequence[Row]) -> list[Span]:
        spans = []
        first = 0
        while first < len(rows):
            n = _neighbours(rows[first:])
            lengths = [row.kv.length + 1 for row in rows[first : first + n]]
            spans.append(
                Span(
                    first=first,
                    slot=rows[first].kv.slot,
                    n=n,
                    longest=max(lengths),
                    mask=self._mask(lengths),
                )
            )
            first += n
        return spans

    def _mask(self, lengths: list[int]) -> Tensor | None:
        if min(lengths) == max(lengths):
            return None
        last = torch.tensor(lengths) - 1  # [n], each row's own position
        return self._causal[last, : max(lengths)][:, None, None, :]

    def __call__(self, layer: int, qkv: Tensor, plan: Plan) -> Tensor:
        """Store this layer's keys and values, then attend. qkv [N, 3C] -> z [N, C]."""
        qkv = qkv.view(-1, 3, self._n_head, self._d_head)
        q = qkv[:, 0]  # [N, H, D]
        self._buffers.store(layer, plan.rows, qkv[:, 1:])
        parts = [self._attend_span(layer, q, span) for span in plan.spans]
        parts += [self._attend_chunk(layer, q, chunk) for chunk in plan.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_span(self, layer: int, q: Tensor, span: Span) -> Tensor:
        slots = slice(span.slot, span.slot + span.n)
        z = scaled_dot_product_attention(
            q[span.first : span.first + span.n].unsqueeze(2),  # [n, H, 1, D]
            self._buffers.keys[slots, layer, :, : span.longest],
            self._buffers.values[slots, layer, :, : span.longest],
            attn_mask=span.mask,
        )
        return z.reshape(span.n, -1)

    def _attend_chunk(self, layer: int, q: Tensor, chunk: Chunk) -> Tensor:
        past, stop = chunk.past_length, chunk.past_length + chunk.n_new
        own = q[chunk.first : chunk.first + chunk.n_new].transpose(0, 1).unsqueeze(0)
        z = scaled_dot_product_attention(
            own,  # [1, H, T, D]
            self._buffers.keys[chunk.slot, layer, :, :stop].unsqueeze(0),
            self._buffers.values[chunk.slot, layer, :, :stop].unsqueeze(0),
            attn_mask=self._causal[past:stop, :stop] if past else None,
            is_causal=not past,  # torch aligns this one to the upper left: right without a past
        )
        return z.transpose(1, 2).reshape(chunk.n_new, -1)


def in_order(rows: Sequence[Row]) -> list[int]:
    """Indices of `rows` in the order that `Attention.plan` needs."""
    return sorted(range(len(rows)), key=lambda i: (len(rows[i].token_ids) > 1, rows[i].kv.slot))


def _neighbours(rows: Sequence[Row]) -> int:
    """How many of the leading rows are worth one call: adjacent slots, little padding."""
    longest = total = 0
    for n, row in enumerate(rows):
        longest, total = max(longest, row.kv.length + 1), total + row.kv.length + 1
        padded = (n + 1) * longest - total
        if row.kv.slot != rows[0].kv.slot + n or padded > total // 4 + 32 * n:
            return n
    return len(rows)


def _chunks(rows: Sequence[Row], first: int) -> list[Chunk]:
    chunks = []
    for row in rows:
        n_new = len(row.token_ids)
        chunks.append(Chunk(first=first, slot=row.kv.slot, past_length=row.kv.length, n_new=n_new))
        first += n_new
    return chunks

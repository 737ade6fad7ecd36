"""Random tables over random keys and values, and attention to them in the plainest way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from cache.accounting import KV
from cache.buffers import KVBuffers, Shape
from model.batch import Row

N_SLOTS, N_CTX, LAYER = 5, 160, 1
PIECES = N_CTX // 32


@dataclass(frozen=True)
class Asked:
    """One row of a batch: a place, and how many tokens it steps, or reads again from `start` on."""

    kv: KV
    n_new: int
    start: int | None = None

    @property
    def row(self) -> Row:
        return Row(kv=self.kv, token_ids=[0] * self.n_new, start=self.start)


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Any place: all in one slot, or with pieces anywhere, as if shared with others."""
    slot = st.integers(0, N_SLOTS - 1)
    home, cut = draw(slot), draw(st.integers(0, PIECES))
    slots = [draw(slot)] * cut + [home] * (PIECES - cut)
    if draw(st.integers(0, 4)) == 0:
        slots = draw(st.lists(slot, min_size=PIECES, max_size=PIECES))
    length = draw(st.one_of(st.integers(0, N_CTX - 1), st.sampled_from([0, 31, 32, 33, 63, 64])))
    start = draw(st.integers(0, length - 1)) if length and draw(st.integers(0, 3)) == 0 else None
    most = N_CTX - length if start is None else length - start
    n_new = draw(st.one_of(st.just(1), st.just(1), st.integers(1, most)))
    kv = KV()
    kv.lay(slots)
    kv.length = kv.ready = length
    return Asked(kv, n_new, start)


def filled(dtype: torch.dtype = torch.float32, *, d_head: int = 8, seed: int = 0) -> KVBuffers:
    """Buffers in which every row of every slot is random."""
    shape = Shape(n_ctx=N_CTX, n_layer=2, n_head=3, d_head=d_head, dtype=dtype)
    buffers = KVBuffers(shape, N_SLOTS)
    generator = torch.Generator().manual_seed(seed)
    for part in (buffers.keys, buffers.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return buffers


def queries(rows: Sequence[Row], buffers: KVBuffers, seed: int = 1) -> Tensor:
    """Random queries [N, H, D] for the flattened rows."""
    n = sum(len(row.token_ids) for row in rows)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, buffers.shape.n_head, buffers.shape.d_head, generator=generator)
    return q.to(buffers.shape.dtype)


def plainly(q: Tensor, rows: Sequence[Row], buffers: KVBuffers) -> Tensor:
    """Attention [N, H, D] in float64, one query and one gathered key at a time."""
    answers: list[Tensor] = []
    for row in rows:
        for p in row.positions:
            slots = [row.kv.slot_of(k) for k in range(p + 1)]
            keys = buffers.keys[LAYER, slots, :, range(p + 1)].double()  # [K, H, D]
            values = buffers.values[LAYER, slots, :, range(p + 1)].double()
            scores = torch.einsum("hd,khd->hk", q[len(answers)].double(), keys)
            weights = (scores / buffers.shape.d_head**0.5).softmax(-1)
            answers.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(answers)

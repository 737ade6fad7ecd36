from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.buffers import KVBuffers, Shape
from cache.errors import NoAddressSpace

SHAPES = {
    "small": Shape(n_ctx=64, n_layer=2, n_head=2, d_head=8),
    "no multiple of a page": Shape(n_ctx=77, n_layer=2, n_head=3, d_head=5),
    "several pages a head": Shape(n_ctx=256, n_layer=1, n_head=2, d_head=64),
    "bfloat16": Shape(n_ctx=256, n_layer=1, n_head=2, d_head=64, dtype=torch.bfloat16),
    "odd bfloat16": Shape(n_ctx=211, n_layer=2, n_head=3, d_head=13, dtype=torch.bfloat16),
}
N_SLOTS = 3


def everything(buffers: KVBuffers) -> tuple[Tensor, ...]:
    """Each with slots in the first place and positions in the last but one."""
    return buffers.keys.transpose(0, 1), buffers.values.transpose(0, 1), buffers.ln_f


def filled(buffers: KVBuffers) -> tuple[Tensor, ...]:
    parts = everything(buffers)
    for part in parts:
        part.copy_(torch.randint(1, 100, part.shape))
    return parts


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_new_buffer_is_zero_and_nothing_overlaps(shape: Shape) -> None:
    buffers = KVBuffers(shape, N_SLOTS)
    kv = (shape.n_layer, N_SLOTS, shape.n_head, shape.n_ctx, shape.d_head)
    assert buffers.keys.shape == buffers.values.shape == kv
    assert buffers.ln_f.shape == (N_SLOTS, shape.n_ctx, shape.n_head * shape.d_head)
    assert buffers.keys.dtype == buffers.values.dtype == shape.dtype
    assert buffers.ln_f.dtype == torch.float32
    for i, part in enumerate(everything(buffers)):
        assert not part.any()
        part.fill_(i + 1)
    for i, part in enumerate(everything(buffers)):
        assert bool((part == i + 1).all())


@given(
    name=st.sampled_from(sorted(SHAPES)),
    slot=st.integers(0, N_SLOTS - 1),
    ends=st.tuples(st.integers(0, 280), st.integers(0, 280)),
)
@settings(deadline=None, max_examples=60)
def test_dropped_positions_are_zero_and_all_others_untouched(
    name: str, slot: int, ends: tuple[int, int]
) -> None:
    shape = SHAPES[name]
    start, stop = sorted(ends)  # the last piece may end past n_ctx
    buffers = KVBuffers(shape, N_SLOTS)
    expected = [part.clone() for part in filled(buffers)]
    for part in expected:
        part[slot, ..., start:stop, :] = 0
    buffers.drop(slot, range(start, stop))
    for part, right in zip(everything(buffers), expected, strict=True):
        assert torch.equal(part, right)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_copied_positions_are_the_same_and_all_others_untouched(shape: Shape) -> None:
    buffers = KVBuffers(shape, N_SLOTS)
    expected = [part.clone() for part in filled(buffers)]
    for part in expected:
        part[0, ..., 32:51, :] = part[2, ..., 32:51, :]
    buffers.copy(2, 0, range(32, 51))
    for part, right in zip(everything(buffers), expected, strict=True):
        assert torch.equal(part, right)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_are_stored_where_their_slot_layer_and_position_are(shape: Shape) -> None:
    buffers = KVBuffers(shape, N_SLOTS)
    slots, positions, layer = (2, 0, 2), (5, 60, 6), shape.n_layer - 1
    expected = [part.clone() for part in filled(buffers)]
    kv = torch.randn(3, 2, shape.n_head, shape.d_head).to(shape.dtype)
    for n, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        for i in (0, 1):
            expected[i][slot, layer, :, position] = kv[n, i]
    buffers.store(layer, buffers.rows_of(slots, positions), kv)
    for part, right in zip(everything(buffers), expected, strict=True):
        assert torch.equal(part, right)


def test_a_dropped_row_can_be_written_again() -> None:
    buffers = KVBuffers(SHAPES["several pages a head"], N_SLOTS)
    buffers.keys[:, 1].fill_(7)
    buffers.drop(1, range(256))
    buffers.keys[0, 1, 0, 3] = 5
    assert buffers.keys.sum() == 5 * 64


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_follows_what_is_written_and_goes_back_when_dropped() -> None:
    """A mapping of 2 GiB costs nothing; 128 MiB are written, dropped, and gone."""
    mib = 1024**2
    shape = Shape(n_ctx=1024, n_layer=8, n_head=16, d_head=64)  # 64 MiB of K/V a slot
    before = resident_bytes()
    buffers = KVBuffers(shape, 32)
    assert resident_bytes() - before < 32 * mib
    buffers.keys[:, 3].fill_(1)
    buffers.values[:, 3].fill_(1)
    buffers.keys[:, 7].fill_(1)
    buffers.values[:, 7].fill_(1)
    full = resident_bytes()
    assert full - before > 120 * mib
    buffers.drop(3, range(1024))
    assert full - resident_bytes() > 60 * mib
    buffers.drop(7, range(512, 1024))
    assert full - resident_bytes() > 90 * mib
    assert bool((buffers.keys[:, 7, :, :512] == 1).all())


def test_a_machine_that_refuses_so_many_slots_gets_fewer() -> None:
    buffers = KVBuffers(SHAPES["small"], 1 << 40)
    assert 1 <= buffers.n_slots < 1 << 40
    assert buffers.keys.shape[1] == buffers.n_slots
    buffers.keys[0, buffers.n_slots - 1, 0, 0] = 1
    buffers.drop(buffers.n_slots - 1, range(64))
    assert not buffers.keys[:, buffers.n_slots - 1].any()


def test_a_machine_that_refuses_one_slot_says_so() -> None:
    with pytest.raises(NoAddressSpace):
        KVBuffers(Shape(n_ctx=1 << 44, n_layer=1, n_head=1, d_head=8), 4)


@pytest.mark.parametrize(
    ("dtype", "kv", "whole"), [(torch.float32, 73728, 76800), (torch.bfloat16, 36864, 39936)]
)
def test_gpt2_costs_per_token_what_it_must(dtype: torch.dtype, kv: int, whole: int) -> None:
    shape = Shape(n_ctx=1024, n_layer=12, n_head=12, d_head=64, dtype=dtype)
    assert (shape.kv_bytes_per_token, shape.row_bytes) == (kv, whole)

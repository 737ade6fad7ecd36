import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.accounting import KV, PIECE
from cache.buffers import Shape
from cache.errors import CacheFull
from cache.kv import KVCache

SHAPE = Shape(n_ctx=100, n_layer=2, n_head=2, d_head=6)
PIECE_BYTES = PIECE * (2 * 2 * 12 * 4 + 12 * 4)


def cache(n_pieces: int = 8, max_slots: int = 8, piece: int = PIECE) -> KVCache:
    budget = n_pieces * piece * SHAPE.row_bytes
    return KVCache(SHAPE, budget_bytes=budget, max_slots=max_slots, piece=piece)


def rows(cache: KVCache, slot: int, positions: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [L, H, n, D] and `ln_f` [n, C] as they lie in the memory."""
    keys, values, ln_f = cache.buffers.keys, cache.buffers.values, cache.buffers.ln_f
    return keys[:, slot, :, positions], values[:, slot, :, positions], ln_f[slot, positions]


def write(cache: KVCache, kv: KV, values: list[int]) -> None:
    """What a pass does: fill a row for each value. Keys, values and `ln_f` differ."""
    kv.stage(len(values))
    for position, value in enumerate(values, kv.length):
        parts = rows(cache, kv.slot_of(position), slice(position, position + 1))
        for i, part in enumerate(parts):
            part.fill_(value + i / 4)


def step(cache: KVCache, kv: KV, values: list[int]) -> None:
    cache.reserve(kv, kv.length + len(values))
    write(cache, kv, values)
    kv.advance(len(values))


def read(cache: KVCache, kv: KV) -> list[int]:
    """What was written at each position up to `ready`, every byte of it looked at."""
    found = []
    for position in range(kv.ready):
        parts = rows(cache, kv.slot_of(position), slice(position, position + 1))
        value = int(parts[0].flatten()[0])
        assert all(bool((part == value + i / 4).all()) for i, part in enumerate(parts))
        found.append(value)
    return found


def assert_zero(cache: KVCache, slot: int, positions: slice) -> None:
    assert not any(part.any() for part in rows(cache, slot, positions))


@pytest.mark.parametrize(
    ("budget", "pieces"),
    [(0, 1), (PIECE_BYTES - 1, 1), (2 * PIECE_BYTES - 1, 1), (2 * PIECE_BYTES, 2)],
)
def test_a_budget_is_whole_pieces_and_at_least_one(budget: int, pieces: int) -> None:
    small = KVCache(SHAPE, budget_bytes=budget, max_slots=8)
    assert small.usage().bytes_total == pieces * PIECE_BYTES
    assert small.free_places == 8  # many places may share what little there is
    kv = small.open()
    small.reserve(kv, pieces * PIECE)
    assert small.free_pieces == 0
    with pytest.raises(CacheFull):
        small.reserve(kv, pieces * PIECE + 1)
    assert small.usage().bytes_used == pieces * PIECE_BYTES


def test_usage_in_exact_bytes() -> None:
    own = cache()

    def usage() -> tuple[float, ...]:
        own.check()
        now = own.usage()
        assert (now.bytes_total, now.bytes_per_token) == (8 * PIECE_BYTES, 192)
        return tuple(n / PIECE_BYTES for n in (now.bytes_used, now.bytes_shared, now.bytes_cached))

    parent = own.open()
    assert usage() == (0, 0, 0)
    step(own, parent, list(range(70)))
    assert usage() == (3, 0, 0)
    child, other = own.fork(parent, 40), own.fork(parent, 70)
    assert usage() == (3, 3, 0)
    own.reserve(child, 41)
    assert usage() == (4, 3, 0)
    assert own.fits(child, 160, beside=[])  # 5 pieces of 8
    assert own.fits(child, 160, beside=[parent])  # 2 more, and one is shared
    assert not own.fits(child, 250, beside=[parent, other])
    own.index(parent, "", range(70))
    own.close(parent)
    assert usage() == (4, 1, 0)
    own.close(other)
    assert usage() == (2, 0, 1)
    own.close(child)
    assert usage() == (0, 0, 2)
    assert (own.free_pieces, own.bytes_for(PIECE + 1)) == (8, 2 * PIECE_BYTES)


def test_parent_and_children_each_read_their_own_history() -> None:
    own = cache(n_pieces=12)
    parent = own.open()
    step(own, parent, list(range(70)))
    half, whole = own.fork(parent, 40), own.fork(parent, 70)
    step(own, parent, [900])
    step(own, half, [500] * 30)
    step(own, whole, [700] * 3)
    own.truncate(parent, 65)
    step(own, parent, [901] * 2)
    first = list(range(70))
    assert read(own, parent) == first[:65] + [901] * 2
    assert read(own, half) == first[:40] + [500] * 30
    assert read(own, whole) == first + [700] * 3
    own.close(parent)
    assert read(own, half) == first[:40] + [500] * 30
    assert read(own, whole) == first + [700] * 3
    own.check()


def test_a_later_session_reads_what_an_earlier_one_with_its_beginning_left() -> None:
    own = cache()
    first, keys = own.open(), list(range(100, 190))
    step(own, first, keys)
    own.index(first, "", keys)
    own.close(first)
    again = own.open()
    step(own, again, keys[:5])
    own.adopt(again, "", [*keys[:70], *[0] * 9], limit=78)
    assert (again.length, again.ready, own.usage().bytes_cached) == (5, 64, 0)
    assert read(own, again) == keys[:64]
    again.advance(59)
    step(own, again, [7, 8])
    assert read(own, again) == [*keys[:64], 7, 8]
    own.check()


def test_cached_pieces_make_way_and_are_counted() -> None:
    own = cache(n_pieces=4)
    first = own.open()
    step(own, first, [1] * 70)
    own.index(first, "", [1] * 70)
    own.close(first)
    assert (own.free_pieces, own.usage().bytes_cached) == (4, 2 * PIECE_BYTES)
    assert own.pieces_needed(own.open(), 65) == 3
    other = own.open()
    step(own, other, [2] * 65)
    assert (own.dropped_cached, own.usage().bytes_cached) == (1, PIECE_BYTES)
    assert read(own, other) == [2] * 65
    assert other.slots == [1, 1, 1]
    assert_zero(own, 0, slice(32, None))
    own.check()


@given(
    stepped=st.integers(0, 100), left=st.integers(0, 100), to=st.integers(0, 100), end=st.booleans()
)
@settings(deadline=None, max_examples=60)
def test_nothing_is_left_that_no_session_wrote_whole(
    stepped: int, left: int, to: int, end: bool
) -> None:
    """Rows of a failed step (`left`) go, and pieces given back; a neighbour keeps its own."""
    own = cache()
    neighbour, kv = own.open(), own.open()
    step(own, neighbour, [3] * 33)
    step(own, kv, [5] * stepped)
    own.reserve(kv, 100)
    write(own, kv, [9] * min(left, 100 - stepped))
    if end:
        own.close(kv)
        assert_zero(own, 1, slice(None))
    else:
        own.truncate(kv, to)
        assert read(own, kv) == [5] * min(stepped, to)
        assert_zero(own, 1, slice(min(stepped, kv.reserved), None))
    assert read(own, neighbour) == [3] * 33
    assert_zero(own, 0, slice(33, None))
    own.check()


def test_a_used_slot_is_empty_when_it_is_taken_again() -> None:
    own = cache()
    first, second = own.open(), own.open()
    step(own, first, [1] * 40)
    step(own, second, [2])
    own.close(first)
    assert_zero(own, 0, slice(None))
    again = own.open()
    step(own, again, [3])
    assert (again.slots, second.slots) == ([0], [1])
    assert_zero(own, 0, slice(1, None))
    own.check()


@pytest.mark.parametrize("piece", [1, 8, 128])
def test_pieces_of_any_size(piece: int) -> None:
    own = cache(n_pieces=40, piece=piece)
    kv = own.open()
    step(own, kv, list(range(20)))
    own.index(kv, "", list(range(20)))
    child = own.fork(kv, 19)
    step(own, child, [99] * 2)
    assert (read(own, kv), read(own, child)) == ([*range(20)], [*range(19), 99, 99])
    assert own.usage().bytes_shared == 19 // piece * piece * SHAPE.row_bytes
    own.close(kv)
    own.close(child)
    assert own.usage().bytes_cached == 20 // piece * piece * SHAPE.row_bytes
    own.check()


def test_zero_rows_are_rows() -> None:
    """P13: what is present is counted, not guessed from what is in it."""
    own = cache()
    kv = own.open()
    own.reserve(kv, 40)
    kv.stage(40)
    kv.advance(40)
    child = own.fork(kv, 35)
    own.reserve(child, 36)
    assert (kv.length, child.length, bool(own.buffers.keys.any())) == (40, 35, False)
    assert torch.count_nonzero(own.buffers.ln_f) == 0

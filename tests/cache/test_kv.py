import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV, PIECE
from cache.buffers import Shape
from cache.errors import CacheFull
from cache.kv import KVCache

SHAPE = Shape(n_ctx=100, n_layer=2, n_head=2, d_head=6)
PIECE_BYTES = PIECE * (2 * 2 * 12 * 4 + 12 * 4)


def cache(n_pieces: int = 4, max_slots: int = 8) -> KVCache:
    return KVCache(SHAPE, budget_bytes=n_pieces * PIECE_BYTES, max_slots=max_slots)


def write(cache: KVCache, kv: KV, n_new: int, *, whole: bool = True) -> None:
    """What a pass does: fill rows, and say so if it got to the end."""
    rows = slice(kv.length, kv.length + n_new)
    kv.stage(n_new)
    cache.buffers.keys[kv.slot, :, :, rows] = 1
    cache.buffers.values[kv.slot, :, :, rows] = 1
    cache.buffers.ln_f[kv.slot, rows] = 1
    if whole:
        kv.advance(n_new)


def assert_zero_from(cache: KVCache, slot: int, length: int) -> None:
    assert not cache.buffers.keys[slot, :, :, length:].any()
    assert not cache.buffers.values[slot, :, :, length:].any()
    assert not cache.buffers.ln_f[slot, length:].any()
    assert bool(cache.buffers.keys[slot, :, :, :length].all())
    assert bool(cache.buffers.ln_f[slot, :length].all())


@pytest.mark.parametrize(
    ("budget", "pieces"),
    [(0, 1), (PIECE_BYTES - 1, 1), (2 * PIECE_BYTES - 1, 1), (2 * PIECE_BYTES, 2)],
)
def test_a_budget_is_whole_pieces_and_at_least_one(budget: int, pieces: int) -> None:
    small = KVCache(SHAPE, budget_bytes=budget, max_slots=8)
    assert small.usage().bytes_total == pieces * PIECE_BYTES
    assert small.ledger.n_slots == pieces  # a session at work holds a piece at least
    kv = small.open()
    small.reserve(kv, pieces * PIECE)
    assert small.usage().bytes_used == pieces * PIECE_BYTES
    with pytest.raises(CacheFull):
        small.reserve(kv, pieces * PIECE + 1)
    assert small.usage().bytes_used == pieces * PIECE_BYTES


def test_usage_in_exact_bytes() -> None:
    own = cache()
    kv = own.open()
    assert own.usage().bytes_used == 0
    own.reserve(kv, PIECE + 1)
    usage = own.usage()
    assert (usage.bytes_total, usage.bytes_used) == (4 * PIECE_BYTES, 2 * PIECE_BYTES)
    assert (usage.bytes_shared, usage.bytes_per_token) == (0, 192)
    assert own.bytes_for(PIECE + 1) == 2 * PIECE_BYTES
    own.close(kv)
    assert own.usage().bytes_used == 0
    own.check()


@given(
    stepped=st.integers(0, 100), left=st.integers(0, 100), to=st.integers(0, 100), end=st.booleans()
)
@settings(deadline=None, max_examples=60)
def test_nothing_is_left_beyond_what_is_kept(stepped: int, left: int, to: int, end: bool) -> None:
    """Rows of a failed step (`left`) go too; a neighbour of another length keeps its own."""
    own = cache(n_pieces=8)
    neighbour, kv = own.open(), own.open()
    own.reserve(neighbour, 33)
    write(own, neighbour, 33)
    own.reserve(kv, 100)
    write(own, kv, stepped)
    write(own, kv, min(left, 100 - stepped), whole=False)
    if end:
        own.close(kv)
    else:
        own.truncate(kv, to)
        assert kv.length == min(stepped, to)
    assert_zero_from(own, kv.slot, 0 if end else kv.length)
    assert_zero_from(own, neighbour.slot, 33)
    own.check()


def test_a_used_slot_is_empty_when_it_is_taken_again() -> None:
    own = cache()
    first, second = own.open(), own.open()
    own.reserve(first, 40)
    write(own, first, 40)
    own.close(first)
    again = own.open()
    assert (again.slot, again.length, again.n_pieces) == (0, 0, 0)
    assert_zero_from(own, 0, 0)
    assert second.slot == 1
    own.check()

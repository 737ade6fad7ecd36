import pytest

from cache.accounting import KV, Copy, Ledger, Run
from cache.errors import CacheFull

KEYS = range(100)  # one key a position


def ledger(*, n_slots: int = 3, total_pieces: int = 9, piece: int = 4) -> Ledger:
    return Ledger(n_slots=n_slots, total_pieces=total_pieces, slot_pieces=4, piece=piece)


def numbers(kv: KV) -> tuple[int, int, int, int]:
    return kv.length, kv.ready, kv.written, kv.owned


def step(books: Ledger, kv: KV, n_new: int) -> None:
    """Steps that need nothing dropped and nothing copied."""
    assert books.reserve(kv, kv.length + n_new) == ([], None)
    kv.stage(n_new)
    kv.advance(n_new)


def opened(books: Ledger, length: int) -> KV:
    kv = books.open()
    step(books, kv, length)
    return kv


def left_cached(books: Ledger, length: int, owner: str = "") -> None:
    """A session that came and went."""
    kv = opened(books, length)
    books.index(kv, owner, KEYS)
    books.close(kv)


def test_a_session_from_open_to_close_in_exact_numbers() -> None:
    books = ledger()
    kv = books.open()
    assert (kv.slots, numbers(kv), books.free_pieces, books.free_places) == ([], (0, 0, 0, 0), 9, 2)
    assert books.reserve(kv, 9) == ([], None)
    assert (kv.slots, kv.reserved, kv.runs) == ([0, 0, 0], 12, (Run(0, 0, 12),))
    assert books.free_pieces == 6
    kv.stage(6)
    assert numbers(kv) == (0, 0, 6, 0)
    kv.advance(6)
    assert numbers(kv) == (6, 6, 6, 0)
    kv.stage(3)
    assert numbers(kv) == (6, 6, 9, 0)
    assert books.truncate(kv, 6) == [Run(0, 6, 9), Run(0, 8, 12)]
    assert (numbers(kv), kv.runs, books.free_pieces) == ((6, 6, 6, 0), (Run(0, 0, 8),), 7)
    assert books.truncate(kv, 1) == [Run(0, 4, 8)]  # what is taken back stays until it is written
    assert (numbers(kv), kv.slots, books.free_pieces) == ((1, 1, 1, 0), [0], 8)
    assert books.close(kv) == [Run(0, 0, 4)]
    assert (books.free_pieces, books.free_places) == (9, 3)
    books.check()


@pytest.mark.parametrize(("length", "pieces"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pieces_for_a_length(length: int, pieces: int) -> None:
    books = ledger()
    assert books.pieces_for(length) == pieces
    assert books.pieces_needed(books.open(), length) == pieces


def test_reserving_what_is_there_takes_nothing() -> None:
    books = ledger()
    kv = books.open()
    books.reserve(kv, 8)
    for length in (0, 1, 5, 8):
        assert books.pieces_needed(kv, length) == 0
        assert books.reserve(kv, length) == ([], None)
        assert (kv.slots, books.free_pieces) == ([0, 0], 7)


def test_the_whole_budget_can_be_held_and_not_one_piece_more() -> None:
    books = ledger(total_pieces=6)
    a, b = opened(books, 16), books.open()
    with pytest.raises(CacheFull) as full:
        books.reserve(b, 9)
    assert (full.value.needed_pieces, full.value.free_pieces, full.value.free_places) == (3, 2, 1)
    assert (b.slots, books.free_pieces) == ([], 2)
    books.reserve(b, 8)
    assert (a.slots, b.slots, books.free_pieces) == ([0] * 4, [1, 1], 0)
    books.check()


def test_there_are_as_many_places_as_slots() -> None:
    books = ledger(n_slots=2)
    first = books.open()
    books.fork(first, 0)
    for again in (books.open, lambda: books.fork(first, 0)):
        with pytest.raises(CacheFull) as full:
            again()
        assert (full.value.needed_pieces, full.value.free_places) == (0, 0)
    books.close(first)
    assert books.free_places == 1
    books.check()


def test_a_fork_shares_and_copies_one_partial_piece_when_it_writes() -> None:
    books = ledger()
    parent = opened(books, 10)
    child = books.fork(parent, 6)
    assert (child.slots, numbers(child), books.free_pieces) == ([0, 0], (6, 6, 6, 2), 6)
    with pytest.raises(AssertionError, match="shared piece"):
        child.stage(1)
    assert books.pieces_needed(child, 6) == 0
    assert books.pieces_needed(child, 9) == 2  # one for the copy
    assert books.reserve(child, 9) == ([], Copy(0, 1, range(4, 6)))
    assert (child.slots, numbers(child)) == ([0, 1, 1], (6, 6, 6, 1))
    assert (child.runs, books.free_pieces) == ((Run(0, 0, 4), Run(1, 4, 12)), 4)
    assert [child.slot_of(position) for position in (0, 3, 4, 11)] == [0, 0, 1, 1]
    step(books, parent, 2)
    step(books, child, 3)
    assert books.close(parent) == [Run(0, 4, 12)]
    assert books.close(child) == [Run(0, 0, 4), Run(1, 4, 12)]
    books.check()


def test_a_fork_where_a_piece_ends_copies_nothing() -> None:
    books = ledger()
    child = books.fork(opened(books, 10), 8)
    assert books.pieces_needed(child, 9) == 1
    assert books.reserve(child, 9) == ([], None)
    assert child.runs == (Run(0, 0, 8), Run(1, 8, 12))


def test_a_fork_has_at_most_what_its_parent_has() -> None:
    books = ledger()
    parent = opened(books, 6)
    parent.stage(1)
    assert (books.fork(parent, 7).length, books.fork(parent, 0).slots) == (6, [])
    books.check()


def test_the_owner_goes_on_writing_behind_the_rows_that_a_child_reads() -> None:
    books = ledger()
    parent = opened(books, 6)
    child = books.fork(parent, 6)
    step(books, parent, 1)
    assert books.truncate(parent, 7) == []  # takes nothing back
    step(books, parent, 1)
    assert (parent.slots, child.slots, books.pool.n_shared) == ([0, 0], [0, 0], 2)
    books.check()


def test_an_owner_that_takes_rows_back_copies_before_it_writes_over_them() -> None:
    books = ledger()
    parent = opened(books, 8)
    child = books.fork(parent, 7)
    assert books.truncate(parent, 6) == []
    assert (numbers(parent), parent.slots) == ((6, 6, 6, 2), [0, 0])
    assert books.reserve(parent, 7) == ([], Copy(0, 1, range(4, 6)))
    assert (parent.slots, child.slots) == ([0, 1], [0, 0])
    assert books.reserve(child, 8) == ([], None)  # it is alone with that piece now
    assert numbers(child) == (7, 7, 7, 1)
    books.check()


def test_what_a_failed_step_left_in_a_shared_piece_is_dropped_and_no_more() -> None:
    books = ledger()
    parent = opened(books, 6)
    books.fork(parent, 5)
    parent.stage(2)
    assert books.truncate(parent, 2) == [Run(0, 6, 8)]
    books.check()


def test_a_hundred_forks_of_one_prefix_hold_it_once() -> None:
    books = ledger(n_slots=101, total_pieces=300)
    parent = opened(books, 15)
    children = [books.fork(parent, 14) for _ in range(100)]
    assert (books.pool.n_held, books.pool.n_shared) == (4, 4)
    copies = [books.reserve(child, 15)[1] for child in children]
    assert copies == [Copy(0, slot, range(12, 14)) for slot in range(1, 101)]
    assert (books.pool.n_held, books.pool.n_shared) == (104, 3)
    books.check()


def test_a_closed_session_is_found_by_the_next_that_begins_so() -> None:
    books = ledger()
    left_cached(books, 10)
    assert (books.free_pieces, books.pool.n_cached) == (9, 2)
    kv = books.open()
    assert books.adopt(kv, "", KEYS, limit=9) == []
    assert (kv.slots, numbers(kv)) == ([0, 0], (0, 8, 8, 2))
    assert (books.free_pieces, books.pool.n_cached) == (7, 0)
    with pytest.raises(AssertionError, match="ready"):
        kv.stage(0)
    kv.advance(5)
    with pytest.raises(AssertionError, match="past"):
        kv.advance(4)
    assert numbers(kv) == (5, 8, 8, 2)
    kv.advance(3)
    step(books, kv, 2)
    assert (kv.slots, numbers(kv)) == ([0] * 3, (10, 10, 10, 2))
    books.check()


@pytest.mark.parametrize(("limit", "ready"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_only_whole_pieces_within_the_limit_are_adopted(limit: int, ready: int) -> None:
    books = ledger()
    left_cached(books, 11)
    kv = books.open()
    books.adopt(kv, "", KEYS, limit=limit)
    assert numbers(kv) == (0, ready, ready, ready // 4)
    books.check()


def test_adopted_pieces_replace_own_ones_from_the_last_row_on() -> None:
    books = ledger()
    left_cached(books, 12)
    kv = opened(books, 6)
    books.reserve(kv, 14)
    kv.stage(5)
    assert books.adopt(kv, "", KEYS[:6], limit=6) == []  # it has more itself
    assert kv.slots == [1, 1, 1, 1]
    assert books.adopt(kv, "", KEYS, limit=12) == [Run(1, 6, 11), Run(1, 4, 16)]
    assert (kv.slots, numbers(kv)) == ([1, 0, 0], (6, 12, 12, 3))
    assert books.adopt(kv, "", KEYS, limit=12) == []
    books.check()


def test_another_owner_finds_nothing() -> None:
    books = ledger()
    left_cached(books, 8, owner="a")
    kv = books.open()
    books.adopt(kv, "b", KEYS, limit=8)
    assert numbers(kv) == (0, 0, 0, 0)


def test_rows_ready_are_given_up_by_truncating() -> None:
    books = ledger()
    left_cached(books, 8)
    kv = books.open()
    books.adopt(kv, "", KEYS, limit=8)
    kv.advance(3)
    assert books.truncate(kv, 3) == []
    assert (kv.slots, numbers(kv), books.pool.n_cached) == ([0], (3, 3, 3, 1), 1)
    books.check()


def test_a_lone_holder_writes_in_its_piece_at_the_price_of_the_index() -> None:
    """It needs no room for that, not even in a cache that is full."""
    books = ledger(n_slots=1, total_pieces=3)
    kv = opened(books, 12)
    books.index(kv, "", KEYS)
    assert books.truncate(kv, 3) == []
    assert (books.pool.n_cached, books.pieces_needed(kv, 4)) == (2, 0)
    assert books.reserve(kv, 4) == ([Run(0, 4, 12)], None)
    assert (kv.slots, numbers(kv), books.pool.n_cached) == ([0], (3, 3, 3, 0), 0)
    books.check()


def test_what_is_new_is_indexed_and_what_was_is_not_offered_again() -> None:
    books = ledger()
    kv = opened(books, 7)
    books.index(kv, "", KEYS)
    assert (kv.indexed, list(books.pool.index)) == (1, [(0, 0)])
    step(books, kv, 5)
    books.index(kv, "", KEYS[:9])  # three pieces of rows, two of keys
    assert (kv.indexed, list(books.pool.index)) == (2, [(0, 0), (0, 1)])
    books.truncate(kv, 5)
    assert kv.indexed == 1
    books.check()


def test_check_sees_cooked_books() -> None:
    books = ledger()
    kv = opened(books, 6)
    child = books.fork(kv, 6)
    books.check()
    for name, wrong in [("length", 7), ("ready", 5), ("written", 9), ("owned", 3), ("runs", ())]:
        right = getattr(kv, name)
        setattr(kv, name, wrong)
        with pytest.raises(AssertionError):
            books.check()
        setattr(kv, name, right)
    child.owned = 1  # two owners of one piece
    with pytest.raises(AssertionError):
        books.check()

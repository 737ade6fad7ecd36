import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from cache.accounting import KV, Ledger
from cache.errors import CacheFull


def ledger(*, n_slots: int = 3, total_pieces: int = 6, piece: int = 4) -> Ledger:
    return Ledger(n_slots=n_slots, total_pieces=total_pieces, piece=piece)


def numbers(kv: KV) -> tuple[int, int, int, int]:
    return kv.length, kv.written, kv.n_pieces, kv.reserved


def step(kv: KV, n_new: int) -> None:
    kv.stage(n_new)
    kv.advance(n_new)


def test_a_session_from_open_to_close_in_exact_numbers() -> None:
    books = ledger()
    kv = books.open()
    assert (kv.slot, numbers(kv), books.free_pieces, books.free_slots) == (0, (0, 0, 0, 0), 6, 2)
    books.reserve(kv, 9)
    assert (numbers(kv), books.used_pieces) == ((0, 0, 3, 12), 3)
    kv.stage(6)
    assert numbers(kv) == (0, 6, 3, 12)
    kv.advance(6)
    assert numbers(kv) == (6, 6, 3, 12)
    kv.stage(3)
    assert numbers(kv) == (6, 9, 3, 12)
    assert books.shrink(kv, 6) == range(6, 9)  # the staged rows were never whole
    assert (numbers(kv), books.used_pieces) == ((6, 6, 2, 8), 2)
    assert books.shrink(kv, 1) == range(1, 6)
    assert (numbers(kv), books.used_pieces) == ((1, 1, 1, 4), 1)
    assert books.close(kv) == range(1)
    assert (books.used_pieces, books.free_pieces, books.free_slots) == (0, 6, 3)
    books.check()


@pytest.mark.parametrize(("length", "pieces"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pieces_for_a_length(length: int, pieces: int) -> None:
    assert ledger().pieces_for(length) == pieces


def test_reserving_what_is_held_takes_nothing() -> None:
    books = ledger()
    kv = books.open()
    books.reserve(kv, 8)
    for length in (0, 1, 5, 8):
        books.reserve(kv, length)
        assert (numbers(kv), books.used_pieces) == ((0, 0, 2, 8), 2)


def test_the_whole_budget_can_be_held_and_not_one_piece_more() -> None:
    books = ledger()
    a, b = books.open(), books.open()
    books.reserve(a, 16)
    with pytest.raises(CacheFull) as full:
        books.reserve(b, 9)
    assert (full.value.needed_pieces, full.value.free_pieces, full.value.free_slots) == (3, 2, 1)
    assert (numbers(b), books.used_pieces) == ((0, 0, 0, 0), 4)
    books.reserve(b, 8)
    assert books.free_pieces == 0
    books.check()


def test_the_lowest_free_slot_is_taken_first() -> None:
    books = ledger(n_slots=4)
    held = [books.open() for _ in range(4)]
    assert [kv.slot for kv in held] == [0, 1, 2, 3]
    with pytest.raises(CacheFull):
        books.open()
    for kv in (held[2], held[0], held[3]):
        books.close(kv)
    assert [books.open().slot for _ in range(3)] == [0, 2, 3]
    books.check()


def test_shrinking_to_more_than_is_present_keeps_only_what_is_present() -> None:
    books = ledger()
    kv = books.open()
    books.reserve(kv, 12)
    step(kv, 5)
    kv.stage(4)  # a rebuild that failed: rows 5..8 may hold anything
    assert books.shrink(kv, 8) == range(5, 9)
    assert (numbers(kv), books.used_pieces) == ((5, 5, 2, 8), 2)


def test_stepping_without_room_or_past_what_was_staged_is_a_bug() -> None:
    books = ledger()
    kv = books.open()
    with pytest.raises(AssertionError, match="without room"):
        kv.stage(1)
    books.reserve(kv, 4)
    kv.stage(2)
    with pytest.raises(AssertionError, match="past what was staged"):
        kv.advance(3)


def test_check_sees_cooked_books() -> None:
    books = ledger()
    kv = books.open()
    books.reserve(kv, 4)
    books.used_pieces += 1
    with pytest.raises(AssertionError):
        books.check()
    books.used_pieces -= 1
    kv.length = 1
    with pytest.raises(AssertionError):
        books.check()


class AnyBooks(RuleBasedStateMachine):
    """Any sequence of changes, against a plain record of what each session should have."""

    places = Bundle("places")

    @initialize(n_slots=st.integers(1, 4), pieces=st.integers(4, 12), piece=st.integers(1, 5))
    def begin(self, n_slots: int, pieces: int, piece: int) -> None:
        self.books = Ledger(n_slots=n_slots, total_pieces=pieces, piece=piece)
        self.present: dict[int, int] = {}  # slot -> rows present
        self.dirty: dict[int, set[int]] = {}  # slot -> positions that were ever written

    @rule(target=places)
    def open(self) -> KV | MultipleResults[KV]:
        free = sorted(set(range(self.books.n_slots)) - set(self.present))
        if not free:
            with pytest.raises(CacheFull):
                self.books.open()
            return multiple()
        kv = self.books.open()
        assert kv.slot == free[0]
        self.present[kv.slot], self.dirty[kv.slot] = 0, set()
        return kv

    @rule(kv=places, length=st.integers(0, 30))
    def reserve(self, kv: KV, length: int) -> None:
        more = max(0, -(-length // self.books.piece) - kv.n_pieces)
        before = numbers(kv), self.books.used_pieces
        if more > self.books.free_pieces:
            with pytest.raises(CacheFull):
                self.books.reserve(kv, length)
            assert (numbers(kv), self.books.used_pieces) == before
        else:
            self.books.reserve(kv, length)
            assert kv.reserved >= length
            assert self.books.used_pieces == before[1] + more

    @rule(kv=places, n=st.integers(1, 8), whole=st.booleans())
    def write(self, kv: KV, n: int, whole: bool) -> None:
        n = min(n, kv.reserved - kv.length)
        kv.stage(n)
        self.dirty[kv.slot] |= set(range(kv.length, kv.length + n))
        if whole:
            kv.advance(n)
            self.present[kv.slot] += n

    @rule(kv=places, length=st.integers(0, 30))
    def shrink(self, kv: KV, length: int) -> None:
        dropped = self.books.shrink(kv, length)
        self.present[kv.slot] = min(self.present[kv.slot], length)
        self.dirty[kv.slot] -= set(dropped)
        assert self.dirty[kv.slot] == set(range(self.present[kv.slot]))
        assert kv.n_pieces <= self.books.pieces_for(length)

    @rule(kv=consumes(places))
    def close(self, kv: KV) -> None:
        dropped = self.books.close(kv)
        assert self.dirty.pop(kv.slot) <= set(dropped)
        del self.present[kv.slot]

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "books"):
            return
        self.books.check()
        held = {slot: kv.length for slot, kv in self.books._held.items()}
        assert held == self.present
        assert self.books.free_slots == self.books.n_slots - len(self.present)


TestAnyBooks = AnyBooks.TestCase
TestAnyBooks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

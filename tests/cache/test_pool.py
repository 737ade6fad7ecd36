import pytest

from cache.pool import Pool
from cache.prefixes import Piece, PrefixIndex


def pool(*, n_slots: int = 4, total: int = 12) -> Pool:
    return Pool(n_slots, total, PrefixIndex(1))


def take(pieces: Pool, n: int, slots: list[int] | None = None) -> list[int]:
    """A table of `n` pieces, for which nothing has to be given up."""
    table, freed = pieces.extend(slots or [], n)
    assert freed == []
    return table


def of(slots: list[int]) -> list[Piece]:
    return [(slot, i) for i, slot in enumerate(slots)]


def cache(pieces: Pool, keys: str) -> list[int]:
    """Leave a piece for each key behind, that nobody holds."""
    table = take(pieces, len(keys))
    pieces.index.add("", keys, of(table))
    assert pieces.release(of(table)) == []
    return table


def test_a_place_grows_in_its_slot_and_a_new_one_takes_the_lowest_empty() -> None:
    pieces = pool()
    first = take(pieces, 2)
    second = take(pieces, 1)
    assert (first, second) == ([0, 0], [1])
    assert take(pieces, 4, first) == [0, 0, 0, 0]
    assert take(pieces, 1) == [2]
    assert pieces.release(of(second)) == [(1, 0)]
    assert take(pieces, 1) == [1]


def test_a_blocked_place_goes_on_in_an_empty_slot_and_stays_there() -> None:
    pieces = pool()
    first = take(pieces, 1)
    pieces.hold([(0, 1)])
    assert take(pieces, 4, first) == [0, 1, 1, 1]


def test_without_an_empty_slot_the_one_with_most_room_is_taken() -> None:
    pieces = pool(n_slots=3)
    pieces.hold([(0, 0), (0, 2), (1, 0), (1, 3), (2, 0), (2, 3)])
    assert take(pieces, 4, [0]) == [0, 0, 1, 0]  # behind the last; room for most; where it is free
    pieces = pool(n_slots=3)
    pieces.hold([(0, 0), (0, 1), (1, 0), (1, 2), (2, 0), (2, 3)])
    assert take(pieces, 3, [0]) == [0, 2, 2]


def test_counts_in_exact_numbers() -> None:
    pieces = pool()
    table = take(pieces, 3)
    pieces.hold(of(table)[:2])
    assert (pieces.n_held, pieces.n_shared, pieces.n_cached, pieces.n_free) == (3, 2, 0, 9)
    assert [pieces.is_shared(piece) for piece in of(table)] == [True, True, False]
    pieces.index.add("", "abc", of(table))
    assert [pieces.is_fixed(piece) for piece in of(table)] == [True, True, True]
    assert pieces.release(of(table)) == []
    assert (pieces.n_held, pieces.n_shared, pieces.n_cached, pieces.n_free) == (2, 0, 1, 10)
    pieces.check([of(table)[:2]])
    assert pieces.release(of(table)[:2]) == []
    assert (pieces.n_held, pieces.n_shared, pieces.n_cached, pieces.n_free) == (0, 0, 3, 12)
    assert pieces.forget((0, 1)) == [(0, 1), (0, 2)]
    assert (pieces.n_cached, pieces.n_given_up) == (1, 2)
    assert pieces.forget((0, 1)) == []
    pieces.check([])


def test_the_end_of_the_chain_used_longest_ago_is_given_up_first() -> None:
    pieces = pool(n_slots=4, total=6)
    cache(pieces, "abc")
    cache(pieces, "xy")
    given_up = []
    table: list[int] = []
    for n in range(1, 7):
        table, freed = pieces.extend(table, n)
        given_up.append(freed)
    assert given_up == [[], [(0, 2)], [(0, 1)], [(0, 0)], [(1, 1)], [(1, 0)]]
    assert (pieces.n_held, pieces.n_given_up) == (6, 5)
    pieces.check([of(table)])


def test_what_is_given_up_at_once_comes_in_order_so_that_it_can_be_dropped_together() -> None:
    pieces = pool(n_slots=4, total=6)
    cache(pieces, "abc")
    cache(pieces, "xy")
    assert pieces.extend([], 5) == ([0] * 5, [(0, 0), (0, 1), (0, 2), (1, 1)])


def test_what_was_held_again_is_no_longer_the_oldest() -> None:
    pieces = pool(n_slots=4, total=3)
    old = of(cache(pieces, "a"))
    cache(pieces, "x")
    pieces.hold(old)
    pieces.release(old)
    assert pieces.extend([], 2) == ([1, 1], [(1, 0)])


def test_where_all_slots_are_taken_a_cached_piece_makes_way_at_that_index() -> None:
    """The budget has room, the column has not; what follows the piece goes with it."""
    pieces = pool(n_slots=2, total=12)
    cache(pieces, "ab")
    held = take(pieces, 2)
    assert held == [1, 1]
    assert pieces.extend([], 2) == ([0, 0], [(0, 0), (0, 1)])
    pieces.check([of(held), of([0, 0])])


def test_a_held_piece_under_a_forgotten_one_is_forgotten_but_stays_held() -> None:
    pieces = pool()
    table = cache(pieces, "ab")
    pieces.hold([(0, 1)])
    assert pieces.forget((0, 0)) == [(0, 0)]
    assert not pieces.is_fixed((0, 1))
    assert pieces.release([(0, 1)]) == [(0, 1)]
    assert table == [0, 0]
    pieces.check([])


def test_check_sees_cooked_books() -> None:
    pieces = pool()
    table = take(pieces, 2)
    pieces.check([of(table)])
    for wrong in ([], [of(table), of(table)], [of(table)[:1]]):
        with pytest.raises(AssertionError):
            pieces.check(wrong)
    pieces.n_shared += 1
    with pytest.raises(AssertionError):
        pieces.check([of(table)])

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.prefixes import Piece, PrefixIndex

KEYS = (10, 11, 20, 21, 30, 31, 40)  # three whole pieces of two, and one key more


def known(index: PrefixIndex) -> set[Piece]:
    index.check()
    return set(index)


def test_the_longest_known_beginning_is_found_in_whole_pieces() -> None:
    index = PrefixIndex(2)
    assert index.chain("", KEYS) == []
    index.add("", KEYS, [(5, 0), (5, 1), (3, 2)])
    assert index.chain("", KEYS) == [(5, 0), (5, 1), (3, 2)]
    assert index.chain("", KEYS[:5]) == [(5, 0), (5, 1)]
    assert index.chain("", KEYS[:1]) == []
    assert index.chain("", [10, 11, 20, 99, 30, 31]) == [(5, 0)]
    assert index.chain("", [99, 11, 20, 21]) == []  # the same second piece after another first
    assert known(index) == {(5, 0), (5, 1), (3, 2)}


def test_only_pieces_with_all_their_keys_are_added() -> None:
    index = PrefixIndex(2)
    index.add("", KEYS[:3], [(0, 0), (0, 1)])
    assert known(index) == {(0, 0)}


def test_what_is_known_keeps_its_piece_and_branches_share_it() -> None:
    index = PrefixIndex(2)
    index.add("", KEYS, [(0, 0), (0, 1)])
    index.add("", [10, 11, 77, 78], [(1, 0), (1, 1)])
    assert index.chain("", [10, 11, 77, 78]) == [(0, 0), (1, 1)]
    assert known(index) == {(0, 0), (0, 1), (1, 1)}


def test_owners_see_nothing_of_each_other() -> None:
    index = PrefixIndex(2)
    index.add("a", KEYS, [(0, 0), (0, 1)])
    assert index.chain("b", KEYS) == []
    index.add("b", KEYS, [(1, 0)])
    assert (index.chain("a", KEYS), index.chain("b", KEYS)) == ([(0, 0), (0, 1)], [(1, 0)])


def test_a_piece_has_one_place_in_the_tree() -> None:
    index = PrefixIndex(2)
    index.add("a", KEYS, [(0, 0), (0, 1)])
    index.add("b", KEYS, [(0, 0), (1, 1)])
    assert index.chain("b", KEYS) == []
    assert known(index) == {(0, 0), (0, 1)}


class Colliding:
    """A step key whose hash is everybody's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colliding) and other.name == self.name


def test_a_hit_is_the_same_keys_not_the_same_hash() -> None:
    index = PrefixIndex(1)
    index.add("", [Colliding("a")], [(0, 0)])
    index.add("", [Colliding("b")], [(1, 0)])
    assert hash(Colliding("a")) == hash(Colliding("c"))
    assert index.chain("", [Colliding("a")]) == [(0, 0)]
    assert index.chain("", [Colliding("b")]) == [(1, 0)]
    assert index.chain("", [Colliding("c")]) == []


def test_dropping_a_piece_drops_what_follows_it() -> None:
    index = PrefixIndex(2)
    index.add("", KEYS, [(0, 0), (0, 1), (0, 2)])
    index.add("", [10, 11, 77, 78], [(0, 0), (1, 1)])
    assert sorted(index.drop((0, 1))) == [(0, 1), (0, 2)]
    assert index.drop((0, 1)) == []
    assert known(index) == {(0, 0), (1, 1)}
    assert sorted(index.drop((0, 0))) == [(0, 0), (1, 1)]
    assert known(index) == set()
    index.add("", KEYS, [(2, 0)])
    assert index.chain("", KEYS) == [(2, 0)]


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


@given(st.lists(st.tuples(st.sampled_from("ab"), PATHS, st.booleans()), max_size=30))
@settings(deadline=None, max_examples=100)
def test_any_changes_against_a_plain_record(
    changes: list[tuple[str, tuple[int, ...], bool]],
) -> None:
    """The record: a dictionary of beginnings. A piece is one key; each offer brings new ones."""
    index = PrefixIndex(1)
    record: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for slot, (owner, keys, is_dropped) in enumerate(changes):
        beginnings = [(owner, keys[:n]) for n in range(1, len(keys) + 1)]
        if is_dropped and beginnings[-1] in record:
            below = [k for k in record if k[0] == owner and k[1][: len(keys)] == keys]
            assert set(index.drop(record[owner, keys])) == {record.pop(k) for k in below}
        else:
            index.add(owner, keys, [(slot, i) for i in range(len(keys))])
            for i, beginning in enumerate(beginnings):
                record.setdefault(beginning, (slot, i))
        assert index.chain(owner, keys) == [record[b] for b in beginnings if b in record]
        assert known(index) == set(record.values())

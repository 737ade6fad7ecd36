from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV
from model.attention.plan import Group, Planner, in_order
from model.batch import Row
from tests.model.attention.tables import Asked, asked, filled

PLAN = Planner(filled(), max_queries=1024)


def place(slots: Sequence[int], length: int) -> KV:
    kv = KV()
    kv.lay(list(slots))
    kv.length = kv.ready = length
    return kv


def decoding(*places: KV) -> list[Row]:
    rows = [Row(kv=kv, token_ids=[0]) for kv in places]
    return [rows[i] for i in in_order(rows)]


def reads(rows: Sequence[Row]) -> list[tuple[int, int, int, int, int, int]]:
    return [(g.first, g.n, g.slot, g.n_slots, g.start, g.stop) for g in PLAN(rows).groups]


def test_equally_long_neighbours_are_one_read_without_a_mask() -> None:
    rows = decoding(place([1] * 5, 70), place([0] * 5, 70), place([2] * 5, 70))
    assert reads(rows) == [(0, 3, 0, 3, 0, 71)]
    assert PLAN(rows).groups[0].mask is None
    assert PLAN(rows).groups[0].whole


def test_neighbours_of_other_lengths_are_masked_to_their_own() -> None:
    (group,) = PLAN(decoding(place([0] * 5, 70), place([1] * 5, 60))).groups
    assert group.mask is not None
    assert group.mask.shape == (2, 1, 1, 71)
    assert (group.mask == 0).sum(-1).flatten().tolist() == [71, 61]


def test_a_gap_between_slots_or_much_padding_is_a_read_of_its_own() -> None:
    assert len(reads(decoding(place([0] * 5, 70), place([2] * 5, 70)))) == 2
    assert len(reads(decoding(place([0] * 5, 150), place([1] * 5, 3)))) == 2


def test_a_shared_prefix_is_read_once_and_the_tails_together() -> None:
    """A parent of 100 tokens and three forks of it at 64."""
    forks = [place([0, 0, slot, slot, slot], 70) for slot in (1, 2, 3)]
    rows = decoding(place([0] * 5, 100), *forks)
    assert reads(rows) == [(0, 4, 0, 1, 0, 101), (0, 3, 1, 3, 64, 71)]
    prefix, tails = PLAN(rows).groups
    assert prefix.mask is not None
    assert (prefix.mask == 0).sum(-1).tolist() == [64, 64, 64, 101]
    assert tails.mask is None
    assert not prefix.whole
    assert not tails.whole


def test_a_chunk_sees_its_past_whole_and_itself_causally() -> None:
    rows = [Row(kv=place([0, 0, 1, 1, 1], 64), token_ids=[0] * 10)]
    past, own = PLAN(rows).groups
    assert (past.mask, past.causal) == (None, False)
    assert (own.start, own.stop, own.causal) == (64, 74, True)
    assert own.mask is not None
    assert (own.mask == 0).sum(-1).tolist() == list(range(1, 11))


@settings(deadline=None, max_examples=200)
@given(st.lists(asked(), min_size=1, max_size=8))
def test_every_query_sees_every_key_before_it_once_and_none_after_it(batch: list[Asked]) -> None:
    rows = [one.row for one in batch]
    rows = [rows[i] for i in in_order(rows)]
    plan = PLAN(rows)
    assert [group.start for group in plan.groups] == sorted(group.start for group in plan.groups)
    tokens = [(row, p) for row in rows for p in row.positions]
    assert seen_by(plan.groups, len(tokens)) == [before(row.kv, p) for row, p in tokens]
    written = np.arange(len(tokens))[plan.written].tolist()
    assert [i for i, (row, _) in enumerate(tokens) if not row.reads_again] == written
    assert [i for i, (row, _) in enumerate(tokens) if row.reads_again] == list(plan.again)


@settings(deadline=None, max_examples=100)
@given(asked(), st.sets(st.integers(0, 159), min_size=1, max_size=9))
def test_queries_of_one_session_at_any_positions(one: Asked, positions: set[int]) -> None:
    ascending = sorted(positions)
    seen = seen_by(PLAN.reads(one.kv, ascending), len(ascending))
    assert seen == [before(one.kv, p) for p in ascending]


def seen_by(groups: Sequence[Group], n: int) -> list[list[tuple[int, int]]]:
    """The keys that each of n queries sees, in the order of the groups."""
    seen: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for group in groups:
        for j in range(group.n):
            seen[group.first + j] += keys_of(group, j)
    return seen


def before(kv: KV, position: int) -> list[tuple[int, int]]:
    return [(kv.slot_of(k), k) for k in range(position + 1)]


def keys_of(group: Group, query: int) -> list[tuple[int, int]]:
    slot = group.slot + query if group.n_slots == group.n else group.slot
    keys = range(group.start, group.stop)
    if group.mask is None:
        return [(slot, k) for k in keys]
    visible = (group.mask.view(group.n, -1)[query] == 0).tolist()
    return [(slot, k) for k, is_visible in zip(keys, visible, strict=True) if is_visible]

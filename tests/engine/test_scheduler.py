import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import Demand, share

STEP = Demand(todo=1, chunk=1)
BEHIND = Demand(todo=0, chunk=0)


def prompt(todo: int, chunk: int | None = None) -> Demand:
    return Demand(todo=todo, chunk=todo if chunk is None else chunk)


def found(todo: int) -> Demand:
    return Demand(todo=todo, chunk=todo, found=True)


@pytest.mark.parametrize(
    ("demands", "granted"),
    [
        ([], []),
        ([STEP, STEP, STEP], [1, 1, 1]),
        ([STEP] * 5, [1, 1, 1, 1, 0]),  # max_rows is 4
        ([prompt(7)], [7]),
        ([prompt(30)], [10]),  # prefill_chunk is 10
        ([prompt(6), prompt(6), prompt(6)], [6, 4, 0]),
        ([prompt(30), STEP, STEP], [10, 1, 1]),  # a prompt holds up nobody
        ([prompt(30), prompt(30), STEP], [10, 0, 1]),
        ([prompt(30, 3), prompt(30)], [3, 7]),  # its reader has room for 3
        ([BEHIND, STEP, BEHIND, prompt(2)], [0, 1, 0, 2]),
        ([BEHIND] * 4 + [STEP], [0, 0, 0, 0, 1]),  # who is behind takes no row
        ([prompt(30), *[prompt(30)] * 4, STEP], [10, 0, 0, 0, 0, 1]),
        ([found(30), found(30), prompt(30), STEP], [25, 0, 10, 1]),  # found_chunk is 25
        ([found(1), found(30)], [1, 24]),
        ([found(5)] * 5, [5, 5, 5, 5, 0]),
    ],
)
def test_exact_shares(demands: list[Demand], granted: list[int]) -> None:
    assert share(demands, max_rows=4, prefill_chunk=10, found_chunk=25) == granted


DEMANDS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 40), st.booleans()).map(
        lambda drawn: Demand(todo=drawn[0], chunk=min(drawn[:2]), found=drawn[2])
    ),
    max_size=20,
)


@given(demands=DEMANDS, max_rows=st.integers(1, 8), prefill_chunk=st.integers(1, 20))
@settings(deadline=None, max_examples=300)
def test_any_shares_keep_the_bounds(
    demands: list[Demand], max_rows: int, prefill_chunk: int
) -> None:
    granted = share(demands, max_rows=max_rows, prefill_chunk=prefill_chunk, found_chunk=9)
    assert len(granted) == len(demands)
    assert sum(n > 0 for n in granted) <= max_rows
    pairs = list(zip(granted, demands, strict=True))
    assert sum(n for n, demand in pairs if demand.todo != 1 and not demand.found) <= prefill_chunk
    assert sum(n for n, demand in pairs if demand.found) <= 9
    for n, demand in zip(granted, demands, strict=True):
        assert 0 <= n <= min(demand.todo, demand.chunk)
    if any(demand.todo for demand in demands):
        assert sum(granted) > 0


@given(todo=st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(deadline=None, max_examples=200)
def test_nobody_starves_when_those_served_go_last(todo: list[int]) -> None:
    """Every queue is worked off, and each job waits for the others once at most."""
    queue = list(enumerate(todo))
    left = dict(queue)
    waited = dict.fromkeys(left, 0)
    order = list(left)
    while order:
        demands = [prompt(left[i]) for i in order]
        granted = share(demands, max_rows=3, prefill_chunk=8, found_chunk=8)
        assert any(granted)
        served = [i for i, n in zip(order, granted, strict=True) if n]
        for i, n in zip(order, granted, strict=True):
            left[i] -= n
            waited[i] = 0 if n else waited[i] + 1
            assert waited[i] <= len(todo)
        order = [i for i in order if i not in served] + [i for i in served if left[i]]

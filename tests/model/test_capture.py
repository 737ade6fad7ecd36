"""Every point, wherever a token stands, beside any mates, against the reference."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV
from model import capture
from model.batch import Floats, Row
from model.points import Point, all_points, parse_points
from tests.agreement import assert_agrees
from tests.lively import SMALL, lively_checkpoint
from tests.reference import reference_points
from tests.stepping import Stepping, assert_same_bits, assert_seen_agrees, named

LIVELY = lively_checkpoint(SMALL)
STEPS = Stepping(LIVELY)
HISTORY = random.Random(5).choices(range(50257), k=40)
EXPECTED = reference_points(LIVELY, HISTORY)
RESIDUALS = parse_points(["embedding", "resid_post.*"], SMALL).points


@pytest.fixture(autouse=True)
def _closes_its_sessions() -> Iterator[None]:
    yield
    for kv in list(STEPS.cache.ledger._places):
        STEPS.cache.close(kv)


def assert_next_agrees(kv: KV, n: int) -> None:
    """The next n tokens of the history, all points."""
    start = kv.length
    seen = STEPS.step(kv, HISTORY[start : start + n])
    assert set(seen) == {str(point) for point in STEPS.points}
    assert_seen_agrees(seen, EXPECTED, range(start, start + n))


def fork(kv: KV, length: int) -> KV:
    child = STEPS.cache.fork(kv, length)
    STEPS.cache.reserve(child, SMALL.n_ctx)
    return child


# Where a token stands.


@pytest.mark.parametrize("n", [1, 2, 40])
def test_at_position_0(n: int) -> None:
    assert_next_agrees(STEPS.open(), n)


@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("past", [1, 7, 31, 32])
def test_after_an_append(past: int, n: int) -> None:
    kv = STEPS.opened(HISTORY[:past])
    assert_next_agrees(kv, min(n, 40 - past))
    if kv.length < 40:
        assert_next_agrees(kv, 1)


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("at", [1, 20, 32, 34])
def test_after_a_fork(at: int, n: int) -> None:
    """Keys lie in several runs then."""
    parent = STEPS.opened(HISTORY[:34])
    child = fork(parent, at)
    assert_next_agrees(child, n)
    assert_next_agrees(fork(child, child.length - 1), 1)


@pytest.mark.parametrize("n", [1, 6])
def test_after_a_truncate(n: int) -> None:
    kv = STEPS.opened([*HISTORY[:10], 1, 2, 3, 4])
    STEPS.cache.truncate(kv, 10)
    STEPS.cache.reserve(kv, SMALL.n_ctx)
    assert_next_agrees(kv, n)


def test_scores_and_pattern_grow_with_the_position() -> None:
    """Rows of a pattern sum to 1, and the last column is the token itself."""
    seen = STEPS.step(STEPS.open(), HISTORY[:9])
    for position, (scores, pattern) in enumerate(
        zip(seen["scores.1"], seen["pattern.1"], strict=True)
    ):
        assert scores.shape == pattern.shape == (SMALL.n_head, position + 1)
        assert np.allclose(pattern.sum(axis=-1), 1, atol=1e-6)
        q, k = seen["q.1"][position], seen["k.1"][position]
        assert_agrees(scores[:, -1], (q * k).sum(-1) / SMALL.d_head**0.5)


def test_lens_rows_give_the_logits_of_a_layer() -> None:
    """Of the last layer: the step's own."""
    kv = STEPS.open()
    seen = STEPS.step(kv, HISTORY[:5])
    rows = STEPS.model.logits([(kv, 4)], np.stack([seen["lens.0"][4], seen["lens.1"][4]]))
    assert rows.shape == (3, 50257)
    wte = LIVELY.tensors["wte.weight"]
    assert_agrees(rows[0], EXPECTED["logits"][4])
    assert_agrees(rows[1], EXPECTED["lens.0"][4] @ wte.T)
    assert_agrees(rows[2], EXPECTED["logits"][4])
    assert np.array_equal(STEPS.model.logits([], seen["lens.0"][4:5])[0].argmax(), rows[1].argmax())


# What is asked for.


@st.composite
def selections(draw: st.DrawFn) -> tuple[Point, ...]:
    """Any points, whole or with units, in any order."""
    whole = [point for point in all_points(SMALL) if point.name not in ("logits", "lens")]
    points = set()
    for point in draw(st.lists(st.sampled_from(whole), max_size=8)):
        n_units = point.shape(SMALL, 0)[point.unit_axis] if "key" not in point.axes else 2
        units = draw(st.none() | st.lists(st.integers(0, n_units - 1), min_size=1, unique=True))
        points.add(Point(point.name, point.layer, None if units is None else tuple(units)))
    return tuple(draw(st.permutations(sorted(points))))


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_each_row_gets_the_points_and_units_it_asked_for(data: st.DataObject) -> None:
    """Rows of one selection share their copies, and none gets another's."""
    common = data.draw(selections())
    asked, histories = [], []
    for i in range(data.draw(st.integers(1, 5))):
        past, n = data.draw(st.tuples(st.integers(0, 9), st.integers(1, 4)))
        history = [(token_id + i) % 50257 for token_id in HISTORY[: past + n]]
        kv = STEPS.opened(history[:past]) if past else STEPS.open()
        points = data.draw(st.just(common) | selections())
        captured = data.draw(st.lists(st.integers(0, n - 1), unique=True))
        kv.stage(n)
        asked.append(Row(kv=kv, token_ids=history[past:], points=points, captured=captured))
        histories.append(history)
    for row, history, own in zip(asked, histories, STEPS.model.forward(asked), strict=True):
        assert set(own) == (set(row.points) if row.captured else set())
        positions = [row.positions[i] for i in row.captured]
        assert_seen_agrees(named(own), reference_points(LIVELY, history), positions)
        STEPS.cache.close(row.kv)


# Memory.


def captured_by(n_rows: int, points: tuple[Point, ...]) -> list[dict[str, Floats]]:
    kvs = [STEPS.opened(HISTORY[: i + 1]) for i in range(n_rows)]
    return [named(own) for own in STEPS.batch([(kv, [7]) for kv in kvs], points=points)]


def root(array: Floats) -> object:
    """What keeps an array's memory alive."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def test_no_row_keeps_its_mates_alive() -> None:
    """A row's points lie in one piece of its own."""
    rows = captured_by(4, RESIDUALS)
    roots = [{id(root(array)) for array in own.values()} for own in rows]
    assert [len(own) for own in roots] == [1, 1, 1, 1]
    assert len(set.union(*roots)) == 4
    size = sum(array.nbytes for array in rows[0].values())
    owner = root(rows[0]["embedding"])
    assert isinstance(owner, np.ndarray)
    assert owner.nbytes == size


def test_what_was_handed_over_is_not_written_again() -> None:
    rows = captured_by(4, STEPS.points)
    kept = [{name: [row.copy() for row in own] for name, own in seen.items()} for seen in rows]
    captured_by(4, STEPS.points)
    for seen, copies in zip(rows, kept, strict=True):
        for name, own in seen.items():
            assert all(np.array_equal(*pair) for pair in zip(own, copies[name], strict=True))


def test_more_than_the_arena_holds_is_captured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    small = captured_by(3, STEPS.points)
    monkeypatch.setattr(capture, "ARENA_BYTES", 1000)
    for few, many in zip(small, captured_by(3, STEPS.points), strict=True):
        assert_same_bits(few, many)


def test_the_arena_is_allocated_once() -> None:
    captured_by(4, STEPS.points)
    before = STEPS.model._sheets._arena.data_ptr()
    captured_by(4, RESIDUALS)
    captured_by(3, STEPS.points)
    assert STEPS.model._sheets._arena.data_ptr() == before


# Capturing changes nothing.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_committed_has_the_same_bits_with_and_without(dtype: str) -> None:
    """Of a chunk, of one token, and of mates, in a batch of the same rows."""
    kept = []
    for points in ((), STEPS.points):
        steps = Stepping(LIVELY, dtype=dtype, n_slots=3)
        kvs = [steps.opened(HISTORY[:n]) for n in (5, 9)]
        steps.batch([(kvs[0], HISTORY[5:12]), (kvs[1], HISTORY[9:10])], points=points)
        steps.batch([(kvs[0], [3]), (kvs[1], [4])], points=points)
        buffers = steps.cache.buffers
        parts = (buffers.keys, buffers.values, buffers.ln_f)
        kept.append([part.float().numpy().tobytes() for part in parts])
    assert kept[0] == kept[1]


TOLERANCE = {"bfloat16": 0.1, "int8": 0.25}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_other_precisions_show_their_own_steps(dtype: str) -> None:
    """Near to float32, as far as their rounding lets them: of a row's size, on average."""
    steps = Stepping(LIVELY, dtype=dtype, n_slots=1)
    kv = steps.opened(HISTORY[:6])
    seen = steps.step(kv, HISTORY[6:12])
    for name, rows in seen.items():
        for row, theirs in zip(rows, EXPECTED[name].numpy()[6:12], strict=True):
            expected = theirs[..., : row.shape[-1]]
            assert row.dtype == np.float32
            error = np.linalg.norm(row - expected) / np.linalg.norm(expected)
            assert error < TOLERANCE[dtype], name

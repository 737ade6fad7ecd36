"""Rows whose tokens are in the cache already: computed again, and nothing is written."""

import random
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV
from model.batch import Floats, Row
from sessions.edits import StepEdits
from tests.lively import SMALL, lively_checkpoint
from tests.model.editing import OPS, add, drawn, mask, scale
from tests.reference import reference_points
from tests.stepping import Stepping, assert_same_bits, assert_seen_agrees, edited, named

LIVELY = lively_checkpoint(SMALL)
STEPS = Stepping(LIVELY)
HISTORY = random.Random(8).choices(range(50257), k=40)
EXPECTED = reference_points(LIVELY, HISTORY)


@pytest.fixture(autouse=True)
def _closes_its_sessions() -> Iterator[None]:
    yield
    for kv in list(STEPS.cache.ledger._places):
        STEPS.cache.close(kv)


def reading(
    kv: KV,
    start: int,
    stop: int,
    edits: Mapping[int, StepEdits] | None = None,
    steps: Stepping = STEPS,
) -> Row:
    row = Row(
        kv=kv,
        token_ids=HISTORY[start:stop],
        start=start,
        points=steps.points,
        captured=range(stop - start),
    )
    return edited(row, edits or {})


def bytes_of(steps: Stepping = STEPS) -> bytes:
    """All of the cache."""
    buffers = steps.cache.buffers
    parts = (buffers.keys, buffers.values, buffers.ln_f)
    return b"".join(part.float().numpy().tobytes() for part in parts)


def assert_is_of_the_cache(seen: Mapping[str, Floats], kv: KV, start: int) -> None:
    """K, V and `ln_f` have the cache's bits."""
    buffers = STEPS.cache.buffers
    for place, row in enumerate(seen["ln_f"]):
        position = start + place
        slot = kv.slot_of(position)
        assert np.array_equal(row, buffers.ln_f[slot, position])
        for layer in range(SMALL.n_layer):
            for name, part in (("k", buffers.keys), ("v", buffers.values)):
                own = seen[f"{name}.{layer}"][place]
                assert np.array_equal(own, part[layer, slot, :, position])


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 40), (7, 19), (31, 33), (39, 40)])
def test_what_was_stepped_is_seen_again(start: int, stop: int) -> None:
    kv = STEPS.opened(HISTORY)
    before = bytes_of()
    (seen,) = STEPS.model.forward([reading(kv, start, stop)])
    assert bytes_of() == before
    assert_seen_agrees(named(seen), EXPECTED, range(start, stop))
    assert_is_of_the_cache(named(seen), kv, start)


def test_several_rows_of_one_session_beside_those_that_step() -> None:
    """The session itself steps on, and a fork of it, which shares its pieces."""
    kv = STEPS.opened(HISTORY[:36])
    child = STEPS.cache.fork(kv, 34)
    STEPS.cache.reserve(child, SMALL.n_ctx)
    rows = [
        reading(kv, 5, 6),
        Row(kv=kv, token_ids=HISTORY[36:37], points=STEPS.points, captured=[0]),
        reading(kv, 10, 22),
        reading(kv, 35, 36),
        Row(kv=child, token_ids=HISTORY[34:37], points=STEPS.points, captured=[0, 1, 2]),
        reading(child, 2, 3),
        reading(child, 30, 34),
        reading(kv, 0, 1),
    ]
    kv.stage(1)
    child.stage(3)
    for row, seen in zip(rows, STEPS.model.forward(rows), strict=True):
        assert_seen_agrees(named(seen), EXPECTED, row.positions)
    kv.advance(1)
    child.advance(3)
    assert_seen_agrees(STEPS.step(kv, HISTORY[37:38]), EXPECTED, [37])
    assert_seen_agrees(STEPS.step(child, HISTORY[37:39]), EXPECTED, [37, 38])


EDITS = {
    4: (add("k.0", np.ones((2, 16))), scale("v.1", 3.0), add("ln_f", np.ones(32))),
    9: (add("resid_pre.1", np.ones(32)), scale("z.0[1]", 0.0), scale("head_out.1[0]", 2.0)),
    12: (mask("scores.0", (2, 9)), add("wte", np.ones(32)), scale("ln_1_scale.1", 2.0)),
}


@pytest.mark.parametrize("chunk", [1, 20])
def test_edits_of_a_step_are_made_again(chunk: int) -> None:
    """But not at what the cache has: a key that was added to is not added to twice."""
    kv = STEPS.open()
    STEPS.step(kv, HISTORY[:20], edits=EDITS)
    before = bytes_of()
    expected = reference_points(LIVELY, HISTORY[:20], edits=EDITS)
    for start in range(0, 20, chunk):
        (seen,) = STEPS.model.forward([reading(kv, start, start + chunk, EDITS)])
        assert_seen_agrees(named(seen), expected, range(start, start + chunk))
        assert_is_of_the_cache(named(seen), kv, start)
    assert bytes_of() == before


def test_the_cache_is_believed() -> None:
    """What is wrong in it is shown, not put right: its own key, and what others make of it."""
    kv = STEPS.opened(HISTORY[:12])
    STEPS.cache.buffers.keys[0, kv.slots[0], 1, 6] += 1.0
    (captured,) = STEPS.model.forward([reading(kv, 6, 12)])
    seen = named(captured)
    difference = seen["k.0"][0] - EXPECTED["k.0"][6].numpy()
    assert np.allclose(difference, [[0.0] * 16, [1.0] * 16], atol=1e-4)
    assert not np.allclose(seen["pattern.0"][5], EXPECTED["pattern.0"][11, :, :12], atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_bits_of_k_and_v_are_those_that_were_shown_when_stepped(
    dtype: str, kv_dtype: str
) -> None:
    steps = Stepping(LIVELY, dtype=dtype, kv_dtype=kv_dtype, n_slots=1)
    kv = steps.open()
    stepped = steps.step(kv, HISTORY[:9])
    (again,) = steps.model.forward([reading(kv, 0, 9)])
    same = {name for name in stepped if name[:2] in ("k.", "v.") or name in ("ln_f", "wte")}
    seen = named(again)
    assert_same_bits({name: stepped[name] for name in same}, {name: seen[name] for name in same})


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_reading_and_stepping_in_one_pass(data: st.DataObject) -> None:
    positions = st.integers(0, 29)
    where = data.draw(st.dictionaries(positions, st.sampled_from(["z.0", "k.1", "mlp_pre.0"])))
    edits = {p: (drawn(name, OPS[p % 4], p, SMALL),) for p, name in where.items()}
    kv = STEPS.open()
    STEPS.step(kv, HISTORY[:30], edits=edits)
    expected = reference_points(LIVELY, HISTORY[:31], edits=edits)
    spans = data.draw(st.lists(st.tuples(positions, st.integers(1, 9)), min_size=1, max_size=6))
    rows = [reading(kv, start, min(30, start + n), edits) for start, n in spans]
    rows.append(Row(kv=kv, token_ids=HISTORY[30:31], points=STEPS.points, captured=[0]))
    rows = data.draw(st.permutations(rows))
    kv.stage(1)
    for row, seen in zip(rows, STEPS.model.forward(rows), strict=True):
        assert_seen_agrees(named(seen), expected, row.positions)
    STEPS.cache.close(kv)

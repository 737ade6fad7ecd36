"""Every edit at every point against the reference; whoever stands beside is left alone."""

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV
from model.batch import Row
from model.edits import Changes
from model.errors import NonFiniteHidden, UnknownPoint
from model.points import Point, all_points
from sessions.edits import Edit, Op, StepEdits
from tests.agreement import assert_agrees
from tests.lively import SMALL, lively_checkpoint
from tests.model.editing import OPS, add, drawn, mask, project, replace, scale
from tests.reference import reference_points
from tests.stepping import Stepping, assert_same_bits, assert_seen_agrees, joined, named

LIVELY = lively_checkpoint(SMALL)
STEPS = Stepping(LIVELY)
HISTORY = random.Random(5).choices(range(50257), k=16)
PLAIN = {name: rows.numpy() for name, rows in reference_points(LIVELY, HISTORY).items()}
EDITABLE = [point for point in all_points(SMALL) if point.is_editable and point.layer in (None, 0)]

Edits = Mapping[int, StepEdits]


@pytest.fixture(autouse=True)
def _closes_its_sessions() -> Iterator[None]:
    yield
    for kv in list(STEPS.cache.ledger._places):
        STEPS.cache.close(kv)


def assert_agrees_with_edits(edits: Edits, sizes: Sequence[int] = (5, 6, 1, 1, 3)) -> None:
    """A history in chunks, all points at all positions; what follows an edit has to follow it."""
    kv, parts = STEPS.open(), []
    for size in sizes:
        chunk = HISTORY[kv.length : kv.length + size]
        parts.append(STEPS.step(kv, chunk, edits=edits))
    expected = reference_points(LIVELY, HISTORY, edits=edits)
    assert_seen_agrees(joined(parts), expected, range(len(HISTORY)))
    assert_agrees(STEPS.logits(kv, 15), expected["logits"][15])
    STEPS.cache.close(kv)


# Each alone.


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("point", EDITABLE, ids=lambda point: point.name)
def test_an_edit_of_a_point_agrees(point: Point, op: Op) -> None:
    """In the middle of a chunk, and in one step alone; of the first layer, so that much follows."""
    name = str(point)
    edits = {p: (drawn(name, op, p, SMALL),) for p in (7, 11)}
    expected = reference_points(LIVELY, HISTORY, edits=edits)
    assert np.abs(expected["ln_f"].numpy() - PLAIN["ln_f"]).max() > 1e-3, "nothing was edited"
    assert_agrees_with_edits(edits)


@pytest.mark.parametrize("point", ["z.1[1]", "q.0[0]", "scores.1[1]", "head_out.0[1]", "ln_1.1[3]"])
@pytest.mark.parametrize("op", OPS)
def test_units_alone_are_edited(point: str, op: Op) -> None:
    edits = {9: (drawn(point, op, 9, SMALL),)}
    assert_agrees_with_edits(edits)


@pytest.mark.parametrize("point", ["scores.0", "scores.1[1]", "scores.0[1,0]"])
@pytest.mark.parametrize("keys", [[(3, 5)], [(0, 1), (6, None)], [(8, 9)], [(2, 99)]])
def test_masked_keys(point: str, keys: list[tuple[int, int | None]]) -> None:
    edits = {8: (mask(point, *keys),), 12: (mask(point, (0, 3)),)}
    assert_agrees_with_edits(edits)


def test_mlp_neurons_by_number() -> None:
    edits = {6: (scale("mlp_post.0[3,100,7]", 0.0), replace("mlp_pre.1[127]", [2.5]))}
    assert_agrees_with_edits(edits)


# What an edit means.


def seen_with(*made: Edit, at: int = 8) -> dict[str, np.ndarray]:
    kv = STEPS.open()
    STEPS.step(kv, HISTORY[:at])
    return STEPS.step(kv, HISTORY[at : at + 1], edits={at: made})


def test_records_show_values_after_edits() -> None:
    value = np.arange(32, dtype=np.float32)
    seen = seen_with(replace("resid_pre.1", value), replace("k.1", np.ones((2, 16))))
    assert np.array_equal(seen["resid_pre.1"][0], value)
    assert np.array_equal(seen["k.1"][0], np.ones((2, 16)))
    assert not np.array_equal(seen["resid_post.0"][0], value)


def test_edits_of_one_point_are_made_in_their_order() -> None:
    ones = np.ones(32)
    first = seen_with(add("mlp_out.0", ones), scale("mlp_out.0", 3.0))
    second = seen_with(scale("mlp_out.0", 3.0), add("mlp_out.0", ones))
    assert_agrees(first["mlp_out.0"] - second["mlp_out.0"], np.full((1, 32), 2.0))


def test_scale_0_ablates_and_project_0_ablates_a_direction() -> None:
    assert not seen_with(scale("z.0[1]", 0.0))["z.0"][0, 1].any()
    direction = np.zeros(32)
    direction[[3, 4]] = 3.0
    seen = seen_with(project("resid_mid.1", direction.tolist(), 0.0))["resid_mid.1"][0]
    plain = PLAIN["resid_mid.1"][8]
    assert abs(seen @ direction) < 1e-4
    others = np.abs(direction) == 0
    assert_agrees(seen[others], plain[others])


@pytest.mark.parametrize("size", [1e-45, 1e-25, 1e25, 3e38])
def test_a_direction_is_one_however_large_or_small_its_numbers_are(size: float) -> None:
    value = (np.random.default_rng(3).choice([-1.0, 1.0], 32) * size).astype(np.float32)
    seen = seen_with(project("resid_mid.1", value.tolist(), 0.0))["resid_mid.1"][0]
    unit = np.sign(value) / np.sqrt(32)
    plain = PLAIN["resid_mid.1"][8]
    assert abs(plain @ unit) > 0.1
    assert_agrees(seen, plain - (plain @ unit) * unit)


def test_attn_out_moves_by_what_its_heads_do() -> None:
    change = np.random.default_rng(1).normal(size=(2, 32))
    seen = seen_with(add("head_out.0", change, scale=2.0))
    assert_agrees(seen["attn_out.0"][0], PLAIN["attn_out.0"][8] + 2 * change.sum(0))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e30])
def test_a_masked_key_never_contributes(size: float) -> None:
    """Whatever its score, and whatever else is done to the scores."""
    raised = np.zeros((2, 9))
    raised[:, 3] = size
    plain = seen_with(mask("scores.0", (3, 4)))
    for others in (
        [add("scores.0", raised), mask("scores.0", (3, 4))],
        [mask("scores.0", (3, 4)), add("scores.0", raised)],
        [mask("scores.0", (3, 4)), scale("scores.0[0]", -1.0), scale("scores.0[0]", -1.0)],
    ):
        seen = seen_with(*others)
        assert (seen["pattern.0"][0][:, 3] == 0).all()
        assert (seen["scores.0"][0][:, 3] == -np.inf).all()
        assert_same_bits(plain, seen)
    zero = seen_with(mask("scores.0", (3, 4)), scale("scores.0", 0.0))["pattern.0"][0]
    assert_agrees(zero, np.where(np.arange(9) == 3, 0, 1 / 8) * np.ones((2, 1)))


def test_an_edited_key_or_value_is_what_the_cache_keeps() -> None:
    kv = STEPS.open()
    made = {3: (replace("k.1", np.full((2, 16), 5.0)), scale("v.0", 2.0))}
    seen = STEPS.step(kv, HISTORY[:6], edits=made)
    buffers, slot = STEPS.cache.buffers, kv.slots[0]
    assert (buffers.keys[1, slot, :, 3] == 5).all()
    assert np.array_equal(buffers.values[0, slot, :, 3].numpy(), seen["v.0"][3])
    assert_agrees(seen["v.0"][3], 2 * PLAIN["v.0"][3])


def test_an_edited_ln_f_row_gives_the_logits() -> None:
    kv = STEPS.open()
    row = np.random.default_rng(2).normal(size=32)
    STEPS.step(kv, HISTORY[:4], edits={3: (replace("ln_f", row),)})
    assert_agrees(STEPS.logits(kv, 3), LIVELY.tensors["wte.weight"].numpy() @ row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("point", ["ln_f", "ln_f_normalized"])
def test_the_largest_ln_f_rows_have_finite_logits_and_larger_ones_are_refused(
    point: str, dtype: str
) -> None:
    """With the signs of the token row that makes the most of them."""
    steps = Stepping(LIVELY, dtype=dtype, n_slots=1)
    wte, gain = (LIVELY.tensors[f"{name}.weight"].numpy() for name in ("wte", "ln_f"))
    row = wte[np.abs(wte).sum(1).argmax()]
    largest = steps.model._largest
    assert 1e30 < largest < 1e38
    numbers = np.sign(row) * largest * 0.99 / (gain if point == "ln_f_normalized" else 1.0)
    kv = steps.open()
    steps.step(kv, [1], edits={0: (replace(point, numbers),)})
    assert steps.logits(kv, 0).max() > 1e36
    assert np.isfinite(steps.logits(kv, 0)).all()
    for factor in (1.1, -1.1):
        kv.stage(1)
        made = (replace(point, numbers), scale(point, factor))
        with pytest.raises(NonFiniteHidden):
            steps.model.forward([Row(kv=kv, token_ids=[1], edits={0: made})])


# Many at once.


@st.composite
def edit_lists(draw: st.DrawFn) -> dict[int, StepEdits]:
    """Any edits at any positions: whole points or units, of any layer."""
    points = [str(point) for point in all_points(SMALL) if point.is_editable]
    points += ["z.0[1]", "v.1[0]", "pattern.0[1]", "mlp_post.1[3,9]", "scores.1[0]", "ln_2.0[31]"]
    edits: dict[int, StepEdits] = {}
    for position in draw(st.lists(st.integers(0, 15), max_size=5, unique=True)):
        chosen = draw(
            st.lists(st.tuples(st.sampled_from(points), st.sampled_from(OPS)), max_size=4)
        )
        made = [drawn(*what, position, SMALL, seed=i) for i, what in enumerate(chosen)]
        if position and draw(st.booleans()):
            made.append(mask("scores.0", (0, draw(st.integers(1, position)))))
        edits[position] = tuple(made)
    return edits


@settings(deadline=None, max_examples=40)
@given(edits=edit_lists(), sizes=st.sampled_from([(16,), (1,) * 16, (3, 9, 1, 3)]))
def test_any_edits_agree(edits: dict[int, StepEdits], sizes: tuple[int, ...]) -> None:
    assert_agrees_with_edits(edits, sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@settings(deadline=None, max_examples=8)
@given(edits=edit_lists())
def test_mates_keep_their_bits(dtype: str, edits: dict[int, StepEdits]) -> None:
    """Of a chunk and of one token, beside a row that is edited and captured or is not."""
    kept = []
    for own in ({}, edits):
        steps = Stepping(LIVELY, dtype=dtype, n_slots=3)
        kvs = [steps.opened(HISTORY[:n]) if n else steps.open() for n in (0, 5, 3)]
        rows = [(kvs[0], HISTORY), (kvs[1], HISTORY[5:9]), (kvs[2], HISTORY[3:4])]
        seen = [named(one) for one in steps.batch(rows, points=steps.points, edits=own)]
        kept.append((seen[1], seen[2], rows_of(steps, kvs[1]), rows_of(steps, kvs[2])))
    for before, after in zip(*kept, strict=True):
        assert_same_bits(before, after)


def rows_of(steps: Stepping, kv: KV) -> dict[str, np.ndarray]:
    """What the cache has of a session."""
    buffers, slot = steps.cache.buffers, kv.slots[0]
    parts = {"k": buffers.keys[:, slot], "v": buffers.values[:, slot], "ln_f": buffers.ln_f[slot]}
    return {name: part.float().numpy().copy() for name, part in parts.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("point", ["mlp_pre.0", "head_out.1", "scores.0", "ln_1_scale.1", "z.0"])
def test_other_precisions_make_the_same_edits(point: str, dtype: str) -> None:
    """Of how far an edit moves the last `ln_f` row, a third at most is rounding."""
    steps = Stepping(LIVELY, dtype=dtype, n_slots=1)
    edits = {8: (scale(point, 3.0),)}
    kv = steps.opened(HISTORY[:8])
    seen = steps.step(kv, HISTORY[8:9], edits=edits)["ln_f"][0]
    expected = reference_points(LIVELY, HISTORY[:9], edits=edits)["ln_f"][8].numpy()
    moved = np.linalg.norm(expected - PLAIN["ln_f"][8])
    assert moved > 0.4
    assert np.linalg.norm(seen - expected) < moved / 3


# Without a pass.


def test_looked_up_points_are_edited_too() -> None:
    """As they were when the step that is found in the cache was computed."""
    made = (scale("wte", 2.0), add("wpe", np.ones(32)), add("resid_pre.0", np.ones(32)))
    points = tuple(Point(name) for name in ("wte", "wpe", "embedding"))
    points += (Point("resid_pre", 0), Point("embedding", None, (3, 1)))
    kv = STEPS.open()
    row = Row(kv=kv, token_ids=HISTORY[:4], points=points, captured=[1, 3], edits={3: made})
    kv.stage(4)
    (stepped,) = STEPS.model.forward([row])
    assert_same_bits(named(STEPS.model.look_up(row)), named(stepped))
    expected = reference_points(LIVELY, HISTORY[:4], edits={3: made})
    assert_seen_agrees(named(stepped), expected, [1, 3])


# Refusals.


@pytest.mark.parametrize("point", ["logits", "lens.0", "mlp_out.2", "z.0[2]"])
def test_what_cannot_be_edited_fails_its_row(point: str) -> None:
    kv = STEPS.open()
    kv.stage(1)
    row = Row(kv=kv, token_ids=[1], edits={0: (scale(point, 0.0),)})
    with pytest.raises((AssertionError, UnknownPoint)):
        STEPS.model.forward([row])


def test_a_value_of_another_position_is_not_stretched() -> None:
    kv = STEPS.opened(HISTORY[:6])
    kv.stage(1)
    made = add("scores.0", np.ones((2, 1)))
    with pytest.raises(AssertionError, match=r"scores.0 is \[2, 7\]"):
        STEPS.model.forward([Row(kv=kv, token_ids=[1], edits={0: (made,)})])


@pytest.mark.parametrize(
    "made",
    [
        (add("resid_mid.0", np.full(32, 3e38), 10.0),),
        (mask("scores.1", (0, None)),),
        (add("k.1", np.full((2, 16), 3e38), 10.0), mask("scores.1", (6, 7))),
        (replace("ln_f", np.repeat([1.6e38, -1.6e38], 16)),),
        (replace("resid_post.0", np.arange(32) * 1e30), replace("resid_post.1", np.ones(32))),
        (replace("k.1", np.full((2, 16), 1e31)), scale("pattern.1", 0.0)),
    ],
    ids=["stream", "all masked", "a key that is masked", "logits", "healed", "a huge key"],
)
def test_values_that_become_infinite_end_the_row(made: StepEdits) -> None:
    kv = STEPS.opened(HISTORY[:6])
    kv.stage(1)
    with pytest.raises(NonFiniteHidden):
        STEPS.model.forward([Row(kv=kv, token_ids=[1], edits={0: made})])


def test_numbers_are_decoded_once() -> None:
    changes = Changes(SMALL)
    made, equal = (scale("z.0", 0.5), scale("z.0", 0.5))
    assert changes.ready(made) is changes.ready(equal)
    value = changes.ready(project("ln_f", [3.0, 4.0] + [0.0] * 30, 0.0)).value
    assert value is not None
    assert torch.allclose(value[:2], torch.tensor([0.6, 0.8]))

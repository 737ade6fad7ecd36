import random
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV
from embedding.errors import PositionOverflow, TokenIdOutOfRange
from model.batch import Floats, Row
from model.config import SIZES, GPT2Config
from model.errors import NonFiniteHidden
from model.points import Point
from model.weights.checkpoint import Checkpoint
from model.weights.fresh import fresh_checkpoint
from tests.agreement import assert_agrees, assert_same_greedy
from tests.lively import SMALL, lively_checkpoint, save_lively
from tests.reference import reference_greedy, reference_points
from tests.stepping import Stepping, assert_same_bits, assert_seen_agrees, joined, named

LONG = GPT2Config(n_ctx=1024, n_embd=24, n_layer=3, n_head=3)
LIVELY = lively_checkpoint(SMALL)
LIVELY_LONG = lively_checkpoint(LONG)

# One model and its cache serve many tests; each opens its own sessions.
SHORT_STEPS = Stepping(LIVELY)
LONG_STEPS = Stepping(LIVELY_LONG)
LONG_STEPS.points = tuple(p for p in LONG_STEPS.points if p.name in ("wpe", "resid_post", "ln_f"))


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50257), k=n)


def assert_points_agree(ours: Mapping[str, Floats], token_ids: Sequence[int]) -> None:
    """All that was seen of all tokens, with one uncached pass over the same ids."""
    checkpoint = LIVELY if len(token_ids) <= SMALL.n_ctx else LIVELY_LONG
    assert_seen_agrees(ours, reference_points(checkpoint, token_ids), range(len(token_ids)))


@pytest.fixture
def kv() -> KV:
    return SHORT_STEPS.open()


@pytest.fixture(autouse=True)
def _closes_its_sessions() -> Iterator[None]:
    yield
    for steps in (SHORT_STEPS, LONG_STEPS):
        for kv in list(steps.cache.ledger._places):
            steps.cache.close(kv)
        steps.cache.check()


# Positions and splits.


def test_p01_one_token_uses_its_own_position(kv: KV) -> None:
    SHORT_STEPS.step(kv, [15496])
    second = SHORT_STEPS.step(kv, [995])
    tables = SHORT_STEPS.model.tables
    assert np.array_equal(second["embedding"][0], (tables.wte[995] + tables.wpe[1]).numpy())
    assert np.array_equal(second["wpe"][0], tables.wpe[1].numpy())
    assert_agrees(second["ln_f"], reference_points(LIVELY, [15496, 995])["ln_f"][1:])


@pytest.mark.parametrize("sizes", [[1] * 600, [7] * 85 + [5], [64] * 9 + [24], [599, 1], [600]])
def test_b10_600_ids_in_any_chunks_are_one_pass(sizes: list[int]) -> None:
    token_ids = ids(600)
    kv = LONG_STEPS.open()
    parts = []
    for size in sizes:
        start = kv.length
        parts.append(LONG_STEPS.step(kv, token_ids[start : start + size]))
    assert kv.length == 600
    assert_points_agree(joined(parts), token_ids)


def test_p08_a_second_chunk_sees_the_first_and_no_later_key() -> None:
    token_ids = ids(16)
    kv = SHORT_STEPS.open()
    parts = [SHORT_STEPS.step(kv, token_ids[:7]), SHORT_STEPS.step(kv, token_ids[7:])]
    other = SHORT_STEPS.step(SHORT_STEPS.open(), token_ids)
    assert_points_agree(joined(parts), token_ids)
    assert_points_agree(other, token_ids)


SPLIT = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(sizes=SPLIT, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_any_split_agrees_and_its_embedding_is_bit_equal(sizes: list[int], seed: int) -> None:
    token_ids = ids(min(64, sum(sizes)), seed)
    kv = SHORT_STEPS.open()
    parts = []
    for size in sizes:
        chunk = token_ids[kv.length : kv.length + size]
        parts += [SHORT_STEPS.step(kv, chunk)] if chunk else []
    whole = joined(parts)
    tables = SHORT_STEPS.model.tables
    exact = tables.wte[token_ids] + tables.wpe[: len(token_ids)]
    assert np.array_equal(whole["embedding"], exact.numpy())
    assert np.array_equal(whole["resid_pre.0"], exact.numpy())
    logits = SHORT_STEPS.model.logits([(kv, p) for p in range(kv.length)])
    expected = reference_points(LIVELY, token_ids)
    assert_seen_agrees(whole, expected, range(len(token_ids)))
    assert_agrees(logits, expected["logits"])
    assert_same_greedy(logits, expected["logits"])
    SHORT_STEPS.cache.close(kv)


def test_keys_values_and_ln_f_rows_in_the_cache_are_the_references(kv: KV) -> None:
    token_ids = ids(50)
    for start in range(0, 50, 13):
        SHORT_STEPS.step(kv, token_ids[start : start + 13])
    buffers, expected = SHORT_STEPS.cache.buffers, reference_points(LIVELY, token_ids)
    for layer in range(SMALL.n_layer):
        for part, name in ((buffers.keys, "k"), (buffers.values, "v")):
            rows = part[layer, kv.slots[0]].transpose(0, 1)  # [n_ctx, H, D]
            assert_agrees(rows[:50], expected[f"{name}.{layer}"], what=name)
            assert not rows[50:].any()
    assert_agrees(buffers.ln_f[kv.slots[0], :50], expected["ln_f"])
    assert not buffers.ln_f[kv.slots[0], 50:].any()


def test_1000_cached_steps_agree_with_one_pass_of_transformers(tmp_path: Path) -> None:
    """From 23 cached positions, one greedy token at a time to position 1023."""
    from transformers import GPT2LMHeadModel

    checkpoint = save_lively(tmp_path, LONG)
    steps = Stepping(checkpoint)
    steps.points = tuple(p for p in steps.points if p.name in ("resid_pre", "ln_f"))
    token_ids, parts = ids(23), []
    kv = steps.open()
    parts.append(steps.step(kv, token_ids))
    while kv.length < 1024:
        token_ids.append(int(steps.logits(kv, kv.length - 1).argmax()))
        parts.append(steps.step(kv, token_ids[-1:]))
    ours = joined(parts)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.inference_mode():
        answer = theirs(
            torch.tensor([token_ids]), use_cache=False, output_hidden_states=True, logits_to_keep=1
        )
    for layer, hidden in enumerate(answer.hidden_states[:-1]):
        assert_agrees(ours[f"resid_pre.{layer}"], hidden[0], what=f"resid_pre.{layer}")
    assert_agrees(ours["ln_f"], answer.hidden_states[-1][0])
    assert_agrees(steps.logits(kv, 1023), answer.logits[0, -1])
    logits = answer.hidden_states[-1][0] @ checkpoint.tensors["wte.weight"].T
    chosen = torch.tensor(token_ids[23:])
    clear = logits[22:-1].topk(2).values.diff(dim=-1).squeeze(-1).abs() > 1e-3
    assert clear.sum() > 950
    assert torch.equal(logits[22:-1].argmax(dim=-1)[clear], chosen[clear])


def test_a_twin_that_restarts_positions_at_0_is_told_apart(kv: KV) -> None:
    """The classic bug would fail these tests: on these weights its ids and rows are others."""
    prompt = [15496, 995]
    SHORT_STEPS.step(kv, prompt)
    ours = SHORT_STEPS.greedy(kv, 40)
    assert ours == reference_greedy(LIVELY, prompt, 40)
    assert ours != reference_greedy(LIVELY, prompt, 40, restart_positions=True)
    assert len(set(ours)) >= 20
    bug = [0, 1, *([0] * 40)]
    restarted = reference_points(LIVELY, prompt + ours, positions=bug)["ln_f"]
    with pytest.raises(AssertionError, match="disagree"):
        assert_agrees(SHORT_STEPS.cache.buffers.ln_f[kv.slots[0], :42], restarted)


# Batch mates.


def in_company(
    steps: Stepping, rows: Sequence[tuple[KV, Sequence[int]]]
) -> list[dict[str, Floats]]:
    return [named(captured) for captured in steps.batch(rows, points=steps.points)]


@pytest.mark.parametrize("lengths", [(4, 14), (1, 1000), (0, 1, 1023), (300, 299, 301, 2)])
def test_p05_p06_mates_at_other_past_lengths(lengths: tuple[int, ...]) -> None:
    histories = [ids(n + 1, seed=n) for n in lengths]
    rows = []
    for history in histories:
        kv = LONG_STEPS.open()
        if history[:-1]:
            LONG_STEPS.step(kv, history[:-1])
        rows.append((kv, history[-1:]))
    for row, history in zip(in_company(LONG_STEPS, rows), histories, strict=True):
        assert_seen_agrees(row, reference_points(LIVELY_LONG, history), [len(history) - 1])


@pytest.mark.parametrize("n_mates", [1, 7, 31])
def test_b01_greedy_ids_do_not_depend_on_mates(n_mates: int) -> None:
    steps = Stepping(LIVELY_LONG, n_slots=40)
    prompts = [ids(3 + 5 * i, seed=i) for i in range(n_mates + 1)]
    kvs = [steps.opened(prompt) for prompt in prompts]
    chosen: list[list[int]] = [[] for _ in kvs]
    for _ in range(64):
        rows = steps.model.logits([(kv, kv.length - 1) for kv in kvs])
        for own, row in zip(chosen, rows, strict=True):
            own.append(int(row.argmax()))
        steps.batch([(kv, own[-1:]) for kv, own in zip(kvs, chosen, strict=True)])
    for prompt, own in list(zip(prompts, chosen, strict=True))[:3]:
        assert own == steps.greedy(steps.opened(prompt), 64)


@pytest.mark.parametrize("n", [1, 2, 16])
def test_b03_the_same_tokens_at_any_batch_size_agree(n: int) -> None:
    token_ids = ids(30)
    for row in in_company(SHORT_STEPS, [(SHORT_STEPS.open(), token_ids) for _ in range(n)]):
        assert_points_agree(row, token_ids)


def test_neighbouring_and_far_slots_agree() -> None:
    """Slots 2, 3, 4 can be read in one call; 6, 9 and 12 cannot."""
    steps = Stepping(LIVELY)
    lengths = (20, 30, 25)
    near = [steps.open_at(slot) for slot in (4, 3, 2)]
    far = [steps.open_at(slot) for slot in (6, 9, 12)]
    histories = [ids(n + 1, seed=n) for n in lengths]
    for kvs in (near, far):
        for kv, history in zip(kvs, histories, strict=True):
            steps.step(kv, history[:-1])
        rows = [(kv, history[-1:]) for kv, history in zip(kvs, histories, strict=True)]
        for row, history in zip(in_company(steps, rows), histories, strict=True):
            assert_seen_agrees(row, reference_points(LIVELY, history), [len(history) - 1])


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Rows of one pass, as (slot, past_length, n_new), in any order of slots."""
    slots = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    rows = []
    for slot in slots:
        past = draw(st.integers(0, 63))
        rows.append((slot, past, draw(st.integers(1, min(64 - past, 20)))))
    return rows


@given(rows=batches(), wanted=st.data())
@settings(deadline=None, max_examples=20)
def test_any_mixture_of_steps_and_chunks_agrees(
    rows: list[tuple[int, int, int]], wanted: st.DataObject
) -> None:
    """Each row asks for points of its own at tokens of its own, and gets exactly those."""
    steps = Stepping(LIVELY, n_slots=10)
    kvs = {slot: steps.open() for slot in range(10)}
    asked, histories = [], []
    for slot, past, n_new in rows:
        kv, history = kvs[slot], ids(past + n_new, seed=slot)
        if past:
            steps.step(kv, history[:past])
        points = wanted.draw(st.lists(st.sampled_from(steps.points), unique=True).map(tuple))
        captured = sorted(wanted.draw(st.sets(st.integers(0, n_new - 1))))
        kv.stage(n_new)
        new = history[past:]
        asked.append(Row(kv=kv, token_ids=new, points=points, captured=captured))
        histories.append(history)
    for row, history, own in zip(asked, histories, steps.model.forward(asked), strict=True):
        expected = reference_points(LIVELY, history)
        assert set(own) == (set(row.points) if row.captured else set())
        positions = [row.positions[i] for i in row.captured]
        assert_seen_agrees(named(own), expected, positions)
        row.kv.advance(len(row.token_ids))
        assert_agrees(steps.logits(row.kv, len(history) - 1), expected["logits"][-1])


@pytest.mark.parametrize("name", ["wte", "wpe", "embedding", "ln_f"])
def test_a_row_that_asks_for_points_at_no_token_gets_none(name: str, kv: KV) -> None:
    """As while a history is rebuilt, or where `points_at` names other positions."""
    kv.stage(2)
    row = Row(kv=kv, token_ids=[1, 2], points=(Point(name),), captured=())
    assert SHORT_STEPS.model.forward([row]) == [{}]


def test_captured_rows_are_the_callers_own(kv: KV) -> None:
    """The model's buffers are used again; what it gave away must not change."""
    first = SHORT_STEPS.step(kv, [15496, 995])
    kept = deepcopy(first)
    SHORT_STEPS.step(kv, [1, 2, 3])
    assert_same_bits(first, kept)


# Faults.


def test_a_step_past_the_last_position_is_refused_and_others_go_on() -> None:
    """C01: before any lookup."""
    token_ids = ids(65)
    kv = SHORT_STEPS.opened(token_ids[:64])
    with pytest.raises(PositionOverflow):
        SHORT_STEPS.model.forward([Row(kv=kv, token_ids=[token_ids[64]])])
    assert_points_agree(SHORT_STEPS.step(SHORT_STEPS.open(), token_ids[:9]), token_ids[:9])


@pytest.mark.parametrize("token_id", [-1, 50257, 2**31])
def test_t10_an_id_outside_the_vocabulary_is_refused(token_id: int, kv: KV) -> None:
    mate = SHORT_STEPS.open()
    for rows in ([(kv, [token_id])], [(mate, [1]), (kv, [5, token_id])]):
        with pytest.raises(TokenIdOutOfRange):
            SHORT_STEPS.model.forward([Row(kv=k, token_ids=t) for k, t in rows])


def test_non_finite_weights_end_a_row_with_a_named_error() -> None:
    poisoned = lively_checkpoint(SMALL)
    poisoned.tensors["wte.weight"][777] = float("nan")
    steps = Stepping(poisoned)
    kv, mate = steps.open(), steps.open()
    with pytest.raises(NonFiniteHidden):
        steps.model.forward([Row(kv=kv, token_ids=[777]), Row(kv=mate, token_ids=[5])])
    assert_agrees(steps.step(mate, [5])["ln_f"], reference_points(LIVELY, [5])["ln_f"])


def test_p13_a_length_is_not_guessed_from_contents() -> None:
    blank = lively_checkpoint(SMALL)
    blank.tensors["wte.weight"][7] = 0
    blank.tensors["wpe.weight"].zero_()
    for name, tensor in blank.tensors.items():
        if name.endswith(".bias"):
            tensor.zero_()
    steps = Stepping(blank)
    kv = steps.open()
    steps.step(kv, [7])
    steps.step(kv, [7])
    last = steps.step(kv, [8])
    assert kv.length == 3
    assert not steps.cache.buffers.keys[0, kv.slots[0], :, :2].any()
    assert_agrees(last["ln_f"], reference_points(blank, [7, 7, 8])["ln_f"][2:])


# Weights and precision.


def test_the_output_is_the_token_table() -> None:
    tensors = LIVELY.tensors
    assert SHORT_STEPS.model.tables.wte.data_ptr() == tensors["wte.weight"].data_ptr()
    changed = lively_checkpoint(SMALL)
    steps = Stepping(changed)
    kv = steps.opened([1, 2, 3])
    before = steps.logits(kv, 2)
    steps.model.tables.wte[4242] *= 2
    after = steps.logits(kv, 2)
    assert after[4242] == pytest.approx(2 * before[4242], rel=1e-5)
    others = np.arange(len(before)) != 4242
    assert np.array_equal(after[others], before[others])


def test_an_entry_of_3000_at_position_0_does_not_spoil_the_rest() -> None:
    """Trained GPT-2 has such entries in the residual stream of its first position."""
    planted = lively_checkpoint(SMALL)
    planted.tensors["wpe.weight"][0, 3] = 3000.0
    steps = Stepping(planted)
    token_ids = ids(40)
    kv = steps.open()
    parts = [steps.step(kv, token_ids[:9]), steps.step(kv, token_ids[9:10])]
    parts.append(steps.step(kv, token_ids[10:]))
    expected = reference_points(planted, token_ids)
    assert np.abs(parts[0]["resid_post.1"][0]).max() > 2000
    assert_seen_agrees(joined(parts), expected, range(40))


def test_fresh_weights_agree_closer_still() -> None:
    checkpoint = fresh_checkpoint(SIZES["tiny"], source="random:tiny")
    steps = Stepping(checkpoint)
    token_ids = ids(70)
    kv = steps.open()
    parts = [steps.step(kv, token_ids[:33]), steps.step(kv, token_ids[33:])]
    expected = reference_points(checkpoint, token_ids)
    seen = joined(parts)
    assert_seen_agrees(seen, expected, range(70))
    for name in ("embedding", "resid_mid.0", "mlp_post.1", "resid_post.1", "ln_f"):
        assert_agrees(seen[name], expected[name], fresh=True, what=name)
    assert_agrees(steps.logits(kv, 69), expected["logits"][69], fresh=True)


def test_the_full_gpt2_shape_agrees() -> None:
    checkpoint = lively_checkpoint(SIZES["gpt2"])
    steps = Stepping(checkpoint, n_slots=2)
    token_ids = ids(12)
    kv, mate = steps.open(), steps.open()
    steps.step(mate, ids(5, seed=1))
    parts = [steps.step(kv, token_ids[:7])]
    parts += [
        in_company(steps, [(mate, [i]), (kv, [token_id])])[1]
        for i, token_id in enumerate(token_ids[7:])
    ]
    expected = reference_points(checkpoint, token_ids)
    assert_seen_agrees(joined(parts), expected, range(12))
    logits = steps.model.logits([(kv, p) for p in range(12)])
    assert_agrees(logits, expected["logits"])
    assert_same_greedy(logits, expected["logits"])


@pytest.mark.parametrize("n_tokens", [1, 2, 1024])
def test_n08_bfloat16_has_no_nan_at_any_length(n_tokens: int) -> None:
    """Stated, not assumed: `ln_f` rows are within 6 % of the float32 row's own size."""
    steps = Stepping(LIVELY_LONG, dtype="bfloat16")
    steps.points = LONG_STEPS.points
    token_ids = ids(n_tokens)
    kv = steps.open()
    own = steps.step(kv, token_ids)
    for row in (row for rows in own.values() for row in rows):
        assert row.dtype == np.float32
        assert np.isfinite(row).all()
    expected = reference_points(LIVELY_LONG, token_ids)["ln_f"].numpy()
    error = np.linalg.norm(own["ln_f"] - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() < 0.06
    logits = steps.logits(kv, n_tokens - 1)
    assert np.isfinite(logits).all()
    difference = np.abs(
        logits - steps.cache.buffers.ln_f[kv.slots[0], n_tokens - 1].numpy() @ wte().T
    )
    assert difference.max() < 0.02 * np.abs(logits).max()


def wte() -> Floats:
    table: Floats = LIVELY_LONG.tensors["wte.weight"].numpy()
    return table


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_n08_a_masked_key_has_a_weight_of_exactly_0(dtype: str) -> None:
    """What lies beyond a row's length may be anything finite: not a bit of the result moves."""
    answers = []
    for junk in (0.0, 3e4):
        steps = Stepping(LIVELY, dtype=dtype)
        rows = []
        for n in (3, 9):  # neighbours: the shorter one is read past its end and masked
            kv = steps.opened(ids(n, seed=n))
            for part in (steps.cache.buffers.keys, steps.cache.buffers.values):
                part[:, kv.slots[0], :, n:] = junk
            rows.append((kv, [5]))
        rows.append((steps.opened(ids(4)), ids(6, seed=6)))
        answers.append(in_company(steps, rows))
    for clean, dirty in zip(*answers, strict=True):
        assert_same_bits(clean, dirty)


def test_bfloat16_ids_are_stated_only_where_the_choice_is_clear(kv: KV) -> None:
    """Ids of half precision are promised to nobody; where the margin is wide they are the same."""
    token_ids = ids(40)
    SHORT_STEPS.step(kv, token_ids)
    half = Stepping(LIVELY, dtype="bfloat16")
    other = half.opened(token_ids)
    exact = SHORT_STEPS.model.logits([(kv, p) for p in range(40)])
    coarse = half.model.logits([(other, p) for p in range(40)])
    top_two = np.sort(np.partition(exact, -2)[:, -2:])
    error = np.abs(coarse - exact).max(axis=-1)
    clear = top_two[:, 1] - top_two[:, 0] > 2 * error
    assert clear.sum() >= 10
    assert (coarse.argmax(axis=-1) == exact.argmax(axis=-1))[clear].all()


def checkpoint_is_untouched(checkpoint: Checkpoint) -> bool:
    return checkpoint.fingerprint == lively_checkpoint(checkpoint.config).fingerprint


def test_stepping_changes_no_weight() -> None:
    SHORT_STEPS.opened(ids(20))
    LONG_STEPS.opened(ids(20))
    assert checkpoint_is_untouched(LIVELY)
    assert checkpoint_is_untouched(LIVELY_LONG)

"""Exact mode over a whole model: bytes are compared, never values."""

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV
from cache.kv import KVCache
from model.attention.explicit import PIECE
from model.batch import Captured, Row
from model.config import GPT2Config
from model.gpt2 import GPT2, cache_shape
from model.points import Point, all_points
from sessions.edits import StepEdits
from tests.agreement import assert_agrees
from tests.lively import lively_checkpoint
from tests.model.editing import add, mask, project, scale
from tests.reference import reference_greedy, reference_points
from tests.stepping import Stepping, assert_same_bits, named

CHECKPOINT = lively_checkpoint(GPT2Config(n_ctx=1024, n_embd=32, n_layer=2, n_head=2))


class ExactSteps(Stepping):
    """A model in exact mode over a cache of its own."""

    def __init__(self, n_slots: int = 40) -> None:
        shape = cache_shape(CHECKPOINT.config, "float32")
        self.cache = KVCache(shape, budget_bytes=1 << 40, max_slots=n_slots, piece=PIECE)
        self.model = GPT2(
            CHECKPOINT,
            self.cache.buffers,
            dtype="float32",
            max_tokens=4096,
            batch_invariant=True,
        )
        self.points = tuple(p for p in all_points(CHECKPOINT.config) if p.name != "logits")
        self.kvs: list[KV] = []

    def open(self) -> KV:
        self.kvs.append(self.cache.open())
        return self.kvs[-1]

    def fork(self, kv: KV, length: int) -> KV:
        self.kvs.append(self.cache.fork(kv, length))
        return self.kvs[-1]

    def close(self, kv: KV) -> None:
        self.kvs.remove(kv)
        self.cache.close(kv)

    def push(
        self,
        *rows: tuple[KV, Sequence[int]],
        points: tuple[Point, ...] = (),
        edits: Mapping[int, StepEdits] | None = None,
    ) -> list[Captured]:
        """Step all of `rows` that have tokens, in one pass; see `batch`."""
        rows = tuple(row for row in rows if row[1])
        for kv, token_ids in rows:
            self.cache.reserve(kv, kv.length + len(token_ids))
        return self.batch(rows, points=points, edits=edits) if rows else []

    def bits(self, kv: KV) -> list[bytes]:
        """Keys, values and `ln_f` row of each position. Logits follow from the last."""
        buffers, positions = self.cache.buffers, range(kv.length)
        slots = [kv.slot_of(p) for p in positions]
        kept = [part[:, slots, :, positions] for part in (buffers.keys, buffers.values)]
        parts = [*kept, buffers.ln_f[slots, positions]]
        rows = torch.cat([part.flatten(1) for part in parts], dim=1).numpy()
        return [row.tobytes() for row in rows]


STEPS = ExactSteps()


@pytest.fixture(autouse=True)
def _closes_its_sessions() -> Iterator[None]:
    yield
    for kv in STEPS.kvs[:]:
        STEPS.close(kv)
    STEPS.cache.check()


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50257), k=n)


def stepped(token_ids: Sequence[int], *, size: int | None = None) -> KV:
    """A new session that holds `token_ids`, in chunks of `size`."""
    kv = STEPS.open()
    while kv.length < len(token_ids):
        STEPS.push((kv, token_ids[kv.length : kv.length + (size or len(token_ids))]))
    return kv


HISTORY = ids(600)
EXPECTED = STEPS.bits(stepped(HISTORY))  # of one pass


def test_it_is_the_reference_model() -> None:
    kv = stepped(HISTORY[:200])
    expected = reference_points(CHECKPOINT, HISTORY[:200])
    logits = STEPS.model.logits([(kv, p) for p in range(136, 200)])
    assert_agrees(logits, expected["logits"][136:])
    prompt = [15496, 995]
    kv = stepped(prompt)
    generated = []
    for _ in range(40):
        generated.append(int(STEPS.logits(kv, kv.length - 1).argmax()))
        STEPS.push((kv, generated[-1:]))
    assert generated == reference_greedy(CHECKPOINT, prompt, 40)


@pytest.mark.parametrize("size", [1, 7, 64, 599])
def test_b10_chunkings_give_the_same_bits(size: int) -> None:
    assert STEPS.bits(stepped(HISTORY, size=size)) == EXPECTED


@pytest.mark.parametrize("n_mates", [0, 1, 7, 31])
def test_b01_mates_that_generate_change_no_bit(n_mates: int) -> None:
    mates = [stepped(ids(3 + 20 * i, seed=i + 1)) for i in range(n_mates)]
    kv = stepped(HISTORY[:500])
    for token_id in HISTORY[500:560]:
        chosen = [int(STEPS.logits(mate, mate.length - 1).argmax()) for mate in mates]
        mine = [(mate, [own]) for mate, own in zip(mates, chosen, strict=True)]
        STEPS.push(*mine, (kv, [token_id]))
    assert STEPS.bits(kv) == EXPECTED[:560]


def test_logits_have_the_same_bits_in_any_slice() -> None:
    kv = stepped(HISTORY[:64])
    alone = [STEPS.logits(kv, p).tobytes() for p in range(64)]
    for n in (2, 3, 16, 17, 64):
        rows = STEPS.model.logits([(kv, p) for p in range(64 - n, 64)])
        assert [row.tobytes() for row in rows] == alone[-n:]


@pytest.mark.parametrize("at", [1, 127, 128, 129, 300, 599])
@pytest.mark.parametrize("size", [1, 50])
def test_forks_go_on_as_if_alone(at: int, size: int) -> None:
    """A fork, and a fork of it, beside the parent that goes on as well."""
    parent = stepped(HISTORY[:at])
    child = STEPS.fork(parent, at)
    grandchild = STEPS.fork(child, at // 2)
    family = [parent, child, grandchild]
    for _ in range(13):
        STEPS.push(*[(kv, HISTORY[kv.length : kv.length + size]) for kv in family])
    for kv in family:
        assert STEPS.bits(kv) == EXPECTED[: kv.length]


@pytest.mark.parametrize("at", [0, 100, 128, 599])
def test_what_was_truncated_comes_back_with_the_same_bits(at: int) -> None:
    kv = stepped(HISTORY)
    STEPS.cache.truncate(kv, at)
    STEPS.push((kv, ids(30, seed=9)))
    STEPS.cache.truncate(kv, at)
    STEPS.push((kv, HISTORY[at:]))
    assert STEPS.bits(kv) == EXPECTED


def test_what_was_evicted_is_rebuilt_with_the_same_bits() -> None:
    """Elsewhere, in other chunks, beside others who step meanwhile."""
    kv = stepped(HISTORY[:590])
    STEPS.close(kv)
    mates = [stepped(ids(30 * i + 5, seed=i + 1)) for i in range(4)]
    rebuilt = STEPS.open()
    for size in (200, 3, 1, 386, 1, 9):
        new = (rebuilt, HISTORY[rebuilt.length : rebuilt.length + size])
        STEPS.push(new, *[(mate, [mate.length]) for mate in mates])
    assert STEPS.bits(rebuilt) == EXPECTED


def test_a_prefix_that_others_computed_has_the_same_bits() -> None:
    first = stepped(HISTORY[:400], size=13)
    STEPS.cache.index(first, "owner", HISTORY[:400])
    second = STEPS.open()
    STEPS.cache.adopt(second, "owner", HISTORY, limit=599)
    assert second.ready == 400 // PIECE * PIECE
    second.advance(second.ready)
    STEPS.push((second, HISTORY[second.length :]))
    assert STEPS.bits(second) == EXPECTED


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int | None]]:
    """Rows of one pass as (past_length, n_new, number of the row it was forked from)."""
    rows: list[tuple[int, int, int | None]] = []
    for i in range(draw(st.integers(1, 8))):
        past = draw(st.integers(0, 599))
        n_new = draw(st.one_of(st.just(1), st.integers(1, 600 - past)))
        rows.append((past, n_new, draw(st.none() | st.integers(0, i - 1)) if i else None))
    return rows


@settings(deadline=None, max_examples=15)
@given(rows=batches())
def test_any_mixture_of_steps_chunks_and_forks(rows: list[tuple[int, int, int | None]]) -> None:
    kvs: list[KV] = []
    for past, _, parent in rows:
        kvs.append(STEPS.open() if parent is None else STEPS.fork(kvs[parent], past))
        if kvs[-1].length < past:
            STEPS.push((kvs[-1], HISTORY[kvs[-1].length : past]))
    asked = [
        (kv, HISTORY[kv.length : past + n]) for kv, (past, n, _) in zip(kvs, rows, strict=True)
    ]
    STEPS.push(*asked)
    for kv in kvs:
        assert STEPS.bits(kv) == EXPECTED[: kv.length]
        STEPS.close(kv)


def test_one_thread_and_two_give_the_same_bits() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        kv = stepped(HISTORY[:200], size=150)
    finally:
        torch.set_num_threads(before)
    assert STEPS.bits(kv) == EXPECTED[:200]


# Seen and edited.

SEEN = HISTORY[:300]
EDITS: dict[int, StepEdits] = {
    40: (scale("z.0[1]", 0.0), add("mlp_pre.1", np.ones(128)), scale("head_out.0[0]", 3.0)),
    129: (mask("scores.0", (0, 7)), scale("pattern.1[1]", 0.5), scale("ln_2_scale.0", 0.7)),
    200: (add("k.0", np.ones((2, 16))), project("resid_mid.0", [1.0] * 32, 0.0)),
    290: (add("resid_post.1", np.ones(32)), scale("scores.1", 2.0), scale("wpe", 3.0)),
}


def edited_bits(size: int, *, n_mates: int = 0, seen: bool = False) -> list[bytes]:
    """The bits of an edited history in chunks, beside mates whose own are looked at."""
    kv, points = STEPS.open(), STEPS.points if seen else ()
    mates = [stepped(HISTORY[: 90 * i + 1]) for i in range(n_mates)]
    while kv.length < len(SEEN):
        new = (kv, SEEN[kv.length : kv.length + size])
        others = [(mate, HISTORY[mate.length : mate.length + 1]) for mate in mates]
        STEPS.push(new, *others, points=points, edits=EDITS)
    for mate in mates:
        assert STEPS.bits(mate) == EXPECTED[: mate.length]
    return STEPS.bits(kv)


def test_edits_give_the_same_bits_in_any_chunks_and_company() -> None:
    once = edited_bits(300)
    assert once[:40] == EXPECTED[:40]
    assert all(own != plain for own, plain in zip(once[200:], EXPECTED[200:300], strict=True))
    for size in (1, 7, 64):
        assert edited_bits(size, n_mates=size % 3 + 1, seen=size == 7) == once


@pytest.mark.parametrize("size", [1, 50, 300])
def test_what_is_seen_everywhere_has_the_same_bits(size: int) -> None:
    kv = STEPS.open()
    while kv.length < len(SEEN):
        STEPS.push((kv, SEEN[kv.length : kv.length + size]), points=STEPS.points)
    assert STEPS.bits(kv) == EXPECTED[:300]


def test_an_edit_that_changes_nothing_leaves_the_bits() -> None:
    """Whatever is computed for it besides."""
    names = ["scores.0", "pattern.1", "mlp_post.0", "head_out.0", "q.1", "resid_mid.0", "wte"]
    made = tuple(scale(name, 1.0) for name in names)
    kv = STEPS.open()
    STEPS.push((kv, SEEN), edits=dict.fromkeys(range(0, 300, 7), made))
    assert STEPS.bits(kv) == EXPECTED[:300]


def test_what_is_read_again_has_the_bits_of_the_step() -> None:
    """Every point, edited or not, alone or in company."""
    kv = STEPS.open()
    (captured,) = STEPS.push((kv, SEEN), points=STEPS.points, edits=EDITS)
    first = named(captured)
    mate = stepped(HISTORY[:77])
    STEPS.cache.reserve(mate, 78)
    for start, stop in ((39, 41), (120, 210), (290, 291)):
        positions = range(start, stop)
        row = Row(
            kv=kv,
            token_ids=SEEN[start:stop],
            start=start,
            points=STEPS.points,
            captured=range(stop - start),
            edits={p - start: EDITS[p] for p in positions if p in EDITS},
        )
        mate.stage(1)
        again, _ = STEPS.model.forward([row, Row(kv=mate, token_ids=[5])])
        assert_same_bits(named(again), {name: own[start:stop] for name, own in first.items()})

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.accounting import KV
from cache.buffers import KVBuffers
from model.attention.explicit import PIECE, ExplicitAttention
from model.attention.plan import Planner, in_order
from model.batch import Row
from model.selftest import same_bits
from tests.model.attention.tables import LAYER, N_CTX, N_SLOTS, filled, plainly

PIECES = -(-N_CTX // PIECE)


def alike() -> KVBuffers:
    """Every slot holds the same rows, so that a history reads the same wherever it lies."""
    buffers = filled(d_head=16)
    for part in (buffers.keys, buffers.values):
        part.copy_(part[:, :1].clone())
    return buffers


BUFFERS = alike()
QUERIES = torch.randn(N_CTX, 3, 16, generator=torch.Generator().manual_seed(1))


def row(slots: list[int], length: int, n_new: int) -> Row:
    kv = KV(piece=PIECE)
    kv.lay(slots)
    kv.length = kv.ready = length
    return Row(kv=kv, token_ids=[0] * n_new)


def attended(rows: list[Row], max_queries: int = 128) -> list[Tensor]:
    """Each row's answers [n_new, H, D], all asked in one batch."""
    order = in_order(rows)
    asked = [rows[i] for i in order]
    positions = [p for one in asked for p in one.positions]
    groups = Planner(BUFFERS, max_queries)(asked).groups
    answers = ExplicitAttention(BUFFERS)(LAYER, QUERIES[positions], groups)
    parts = torch.split(answers, [len(one.token_ids) for one in asked])
    return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]


ALONE = torch.cat([attended([row([0] * PIECES, p, 1)])[0] for p in range(N_CTX)])


@st.composite
def placed(draw: st.DrawFn) -> Row:
    """Any history: in one slot, or with pieces anywhere, as if shared with others."""
    slot = st.integers(0, N_SLOTS - 1)
    apart = st.lists(slot, min_size=PIECES, max_size=PIECES)
    slots = draw(st.one_of(slot.map(lambda s: [s] * PIECES), apart))
    edges = st.sampled_from([0, 31, 32, PIECE - 1, PIECE, PIECE + 1])
    length = draw(st.one_of(st.integers(0, N_CTX - 1), edges))
    return row(slots, length, draw(st.one_of(st.just(1), st.integers(1, N_CTX - length))))


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(placed(), min_size=1, max_size=7), max_queries=st.sampled_from([3, 50, 128]))
def test_a_query_has_the_same_bits_in_any_company(rows: list[Row], max_queries: int) -> None:
    for one, answer in zip(rows, attended(rows, max_queries), strict=True):
        assert same_bits(answer, ALONE[one.positions])


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_neighbours_and_those_who_share_a_run_have_the_same_bits(n: int) -> None:
    beside = [row([slot] * PIECES, 140 - slot, 1) for slot in range(n)]
    shared = [row([0] * PIECES, 140 - slot, 1) for slot in range(n)]
    for rows in (beside, shared):
        assert len(Planner(BUFFERS, 128)(rows).groups) == 1
        for one, answer in zip(rows, attended(rows), strict=True):
            assert same_bits(answer, ALONE[one.positions])


def test_it_is_attention() -> None:
    expected = plainly(QUERIES, [row([0] * PIECES, 0, N_CTX)], BUFFERS)
    assert (ALONE.double() - expected).abs().max() < 3e-6


def test_what_lies_behind_a_query_changes_no_bit() -> None:
    """Rows that a neighbour or a failed step left."""
    rows = [row([1] * PIECES, 70, 1)]
    before = BUFFERS.keys.clone(), BUFFERS.values.clone()
    try:
        BUFFERS.keys[:, :, :, 71:] = 100.0
        BUFFERS.values[:, :, :, 71:] = -100.0
        assert same_bits(attended(rows)[0], ALONE[70:71])
    finally:
        BUFFERS.keys.copy_(before[0])
        BUFFERS.values.copy_(before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[0, 0], [3, 1]])
def test_scores_and_what_they_make_of_the_values(dtype: torch.dtype, slots: list[int]) -> None:
    """Of queries at any positions, in any precision of the cache: the parts of the whole."""
    buffers, positions = filled(dtype, d_head=16), [2, 3, 77, 128, 150]
    attention, one = ExplicitAttention(buffers), row(slots, 0, N_CTX)
    q = QUERIES[positions]
    scores, reads = attention.scores(LAYER, q, Planner(buffers, 128).reads(one.kv, positions))
    for query, p, seen in zip(q, positions, scores, strict=True):
        places = [one.kv.slot_of(k) for k in range(p + 1)]
        keys = buffers.keys[LAYER, places, :, range(p + 1)].float()  # [K, H, D]
        expected = torch.einsum("hd,khd->hk", query, keys) / 4
        assert torch.allclose(seen[:, : p + 1], expected, atol=1e-5)
        assert (seen[:, p + 1 :] == -torch.inf).all()
    z = attention.values(LAYER, torch.softmax(scores, dim=2), reads)
    whole = plainly(QUERIES, [one], buffers)[positions]
    assert (z.double() - whole).abs().max() < 3e-6

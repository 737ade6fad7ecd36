"""Every comparison is of bits: float32 seen as int32.

Shapes: T tokens, N rows of several sessions, C width.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embedding.errors import PositionOverflow, TokenIdOutOfRange
from embedding.lookup import Embedder, embed, embed_parts
from embedding.tables import EmbeddingTables

N_CTX, N_VOCAB, N_EMBD = 1024, 50257, 24


def lively_tables() -> EmbeddingTables:
    generator = torch.Generator().manual_seed(0)
    wte = torch.randn(N_VOCAB, N_EMBD, generator=generator)
    wpe = torch.randn(N_CTX, N_EMBD, generator=generator) * torch.logspace(-6, 3, N_CTX)[:, None]
    return EmbeddingTables(wte, wpe)


TABLES = lively_tables()
EMBEDDER = Embedder(TABLES, max_tokens=N_CTX)
Lookup = Callable[[Sequence[int], int], Tensor]
LOOKUPS: list[Lookup] = [lambda ids, past: embed(TABLES, ids, past), EMBEDDER.one]
IDS = st.integers(0, N_VOCAB - 1)

both = pytest.mark.parametrize("lookup", LOOKUPS, ids=["embed", "Embedder.one"])


def rows(token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The definition, row by row. [N, C]."""
    added = [
        TABLES.wte[token_id] + TABLES.wpe[p]
        for token_id, p in zip(token_ids, positions, strict=True)
    ]
    return torch.stack(added) if added else torch.empty(0, N_EMBD)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int]:
    """Tokens and a `past_length` at which they fit."""
    token_ids = draw(st.lists(IDS, max_size=20))
    edge = N_CTX - len(token_ids)
    return token_ids, draw(st.one_of(st.integers(0, edge), st.sampled_from([0, edge])))


@both
@given(step=steps())
@settings(deadline=None, max_examples=150)
def test_bit_equal_at_any_past_length(lookup: Lookup, step: tuple[list[int], int]) -> None:
    token_ids, past_length = step
    positions = range(past_length, past_length + len(token_ids))
    assert same_bits(lookup(token_ids, past_length), rows(token_ids, positions))


@both
@given(step=steps(), cuts=st.lists(st.integers(0, 20)))
@settings(deadline=None, max_examples=150)
def test_any_split_into_appends_is_the_prompt_at_once(
    lookup: Lookup, step: tuple[list[int], int], cuts: list[int]
) -> None:
    token_ids, past_length = step
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    parts = [lookup(token_ids[a:b], past_length + a).clone() for a, b in pairwise(bounds)]
    assert same_bits(torch.cat(parts), lookup(token_ids, past_length))


@given(st.lists(st.tuples(IDS, st.integers(0, N_CTX - 1)), max_size=64))
@settings(deadline=None, max_examples=150)
def test_ragged_rows_equal_each_session_alone(pairs: list[tuple[int, int]]) -> None:
    token_ids, positions = [n for n, _ in pairs], [p for _, p in pairs]
    assert same_bits(EMBEDDER.ragged(token_ids, positions), rows(token_ids, positions))


@given(st.lists(steps(), max_size=6))
@settings(deadline=None, max_examples=100)
def test_sessions_of_a_batch_keep_their_own_positions(batch: list[tuple[list[int], int]]) -> None:
    token_ids = [token_id for ids, _ in batch for token_id in ids]
    positions = [past + t for ids, past in batch for t in range(len(ids))]
    together = EMBEDDER.ragged(token_ids, positions).clone()
    alone = [embed(TABLES, ids, past) for ids, past in batch]
    assert same_bits(together, torch.cat([torch.empty(0, N_EMBD), *alone]))


@both
def test_p01_one_token_uses_its_own_position(lookup: Lookup) -> None:
    lookup([15496], 0)
    second = lookup([995], 1)[0]
    assert same_bits(second, TABLES.wte[995] + TABLES.wpe[1])
    assert not torch.equal(second, TABLES.wte[995] + TABLES.wpe[0])
    assert not torch.equal(second, TABLES.wte[995])


@both
def test_p03_after_a_prompt_of_six_the_steps_are_at_six_seven_eight(lookup: Lookup) -> None:
    ids = [11, 22, 33, 44, 55, 66, 77, 88, 99]
    parts = [lookup(ids[:6], 0).clone(), *(lookup([ids[p]], p).clone() for p in (6, 7, 8))]
    assert same_bits(torch.cat(parts), rows(ids, range(9)))


def test_p13_zero_rows_are_rows() -> None:
    wte, wpe = TABLES.wte.clone(), torch.zeros_like(TABLES.wpe)
    wte[7] = 0
    tables = EmbeddingTables(wte, wpe)
    for h in (embed(tables, [7, 7, 8], 0), Embedder(tables, 3).one([7, 7, 8], 0)):
        assert h.shape == (3, N_EMBD)
        assert not h[:2].any()
        assert same_bits(h[2], wte[8])


@both
@pytest.mark.parametrize("n_tokens", [0, 1, 1023, 1024])
def test_every_length_to_the_limit(lookup: Lookup, n_tokens: int) -> None:
    ids = [(7919 * t) % N_VOCAB for t in range(n_tokens)]
    assert same_bits(lookup(ids, N_CTX - n_tokens), rows(ids, range(N_CTX - n_tokens, N_CTX)))


@both
@pytest.mark.parametrize(("n_tokens", "past_length"), [(1025, 0), (1, 1024), (2, 1023)])
def test_c01_past_the_limit_is_refused_and_the_next_call_works(
    lookup: Lookup, n_tokens: int, past_length: int
) -> None:
    with pytest.raises(PositionOverflow):
        lookup([0] * n_tokens, past_length)
    assert same_bits(lookup([0], 1023), rows([0], [1023]))


def test_c01_ragged_past_the_limit_is_refused() -> None:
    with pytest.raises(PositionOverflow):
        EMBEDDER.ragged([0, 0, 0], [0, 1024, 1])


@both
@pytest.mark.parametrize("bad", [-1, N_VOCAB, 2147483648, 9223372036854775808])
@pytest.mark.parametrize("n_before", [0, 2])
def test_t10_an_id_out_of_range_is_never_another_row(
    lookup: Lookup, bad: int, n_before: int
) -> None:
    with pytest.raises(TokenIdOutOfRange) as refusal:
        lookup([1] * n_before + [bad], 5)
    assert (refusal.value.index, refusal.value.token_id) == (n_before, bad)


def test_t10_ragged_ids_out_of_range_are_refused() -> None:
    with pytest.raises(TokenIdOutOfRange):
        EMBEDDER.ragged([1, -1], [0, 1])


@both
def test_a_negative_past_length_is_a_fault_and_not_the_last_row(lookup: Lookup) -> None:
    with pytest.raises(AssertionError):
        lookup([1], -1)


def test_parts_are_the_rows_that_were_added() -> None:
    parts = embed_parts(TABLES, [5, 6], 40)
    assert same_bits(parts.wte, TABLES.wte[5:7])
    assert same_bits(parts.wpe, TABLES.wpe[40:42])
    assert same_bits(parts.embedding, rows([5, 6], [40, 41]))
    assert parts.embedding.dtype == torch.float32


def test_the_embedder_allocates_no_rows() -> None:
    buffer = EMBEDDER.one([1], 0).data_ptr()
    assert EMBEDDER.one([1, 2, 3], 7).data_ptr() == buffer
    assert EMBEDDER.ragged([1, 2], [9, 4]).data_ptr() == buffer


def test_lookups_leave_the_tables_as_they_were() -> None:
    wte, wpe = TABLES.wte.clone(), TABLES.wpe.clone()
    embed_parts(TABLES, [3, 3, 4], 100).embedding.zero_()
    EMBEDDER.one([3], 100).zero_()
    EMBEDDER.one([3, 4], 100).zero_()
    EMBEDDER.ragged([3, 4], [8, 100]).zero_()
    assert same_bits(TABLES.wte, wte)
    assert same_bits(TABLES.wpe, wpe)


def test_the_stateless_lookup_serves_many_threads() -> None:
    prompts = [[n * 20 + t for t in range(100)] for n in range(32)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ids: embed(TABLES, ids, ids[0]), prompts))
    for ids, h in zip(prompts, together, strict=True):
        assert same_bits(h, rows(ids, range(ids[0], ids[0] + 100)))

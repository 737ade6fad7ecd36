import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounting import KV
from cache.buffers import KVBuffers
from model.attention.fused import FusedAttention
from model.attention.plan import Planner, in_order
from model.batch import Row
from tests.model.attention.tables import LAYER, Asked, asked, filled, plainly, queries

BUFFERS = {dtype: filled(dtype) for dtype in (torch.float32, torch.bfloat16)}


def difference(rows: list[Row], buffers: KVBuffers, max_queries: int = 1024) -> float:
    rows = [rows[i] for i in in_order(rows)]
    q = queries(rows, buffers)
    z = FusedAttention(buffers)(LAYER, q, Planner(buffers, max_queries)(rows).groups)
    assert (z.shape, z.dtype) == (q.shape, q.dtype)
    return float((z.double() - plainly(q, rows, buffers)).abs().max())


@settings(deadline=None, max_examples=150)
@given(st.lists(asked(), min_size=1, max_size=6))
def test_any_tables_read_as_one_key_at_a_time_would(batch: list[Asked]) -> None:
    rows = [one.row for one in batch]
    assert difference(rows, BUFFERS[torch.float32]) < 3e-6
    assert difference(rows, BUFFERS[torch.float32], max_queries=7) < 3e-6
    assert difference(rows, BUFFERS[torch.bfloat16]) < 3e-2


@pytest.mark.parametrize("n_new", [1, 2, 40])
def test_a_fork_of_a_fork_reads_three_runs(n_new: int) -> None:
    kv = KV()
    kv.lay([3, 3, 1, 4, 4])
    kv.length = kv.ready = 100
    rows = [Row(kv=kv, token_ids=[0] * n_new)]
    assert len(Planner(BUFFERS[torch.float32], 1024)(rows).groups) == 3
    assert difference(rows, BUFFERS[torch.float32]) < 3e-6

"""The limit of a decode step: only *read* as many bytes as it must read, and do nothing with them.

Weights once, and every cached key and value once. The limit moves with the machine's neighbours, so
it is one more engine in the rotation. Prefill is no matter of reading and has no such limit.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from bench.cases import Decode, EngineSpec
from bench.engines.base import Engine
from bench.modes import config_in
from bench.samples import Sample, repeat
from model.config import GPT2Config

ITEM = {"float32": 4, "bfloat16": 2, "int8": 1}


class Read(Engine):
    """A probe for one model's bytes in one precision of its weights and one of its K/V."""

    def __init__(self, config: GPT2Config, *, itemsize: int, kv_itemsize: int) -> None:
        self._config = config
        self._itemsize = itemsize
        self._kv_itemsize = kv_itemsize

    def decode(self, case: Decode) -> list[Sample]:
        memory = torch.ones(self._n_bytes(case) // 8, dtype=torch.int64)
        return repeat(memory.sum, case.steps)

    def next_id(self, _: Sequence[int]) -> None:
        return None

    def _n_bytes(self, case: Decode) -> int:
        config = self._config
        n_weights = config.n_params - config.n_ctx * config.n_embd  # of wpe only a row is read
        n_kv = 2 * config.n_layer * config.n_embd * case.batch * case.context
        return n_weights * self._itemsize + n_kv * self._kv_itemsize


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Read:
    torch.set_num_threads(n_threads)
    itemsize, kv_itemsize = ITEM[spec.dtype], ITEM[spec.kv_dtype]
    return Read(config_in(directory), itemsize=itemsize, kv_itemsize=kv_itemsize)

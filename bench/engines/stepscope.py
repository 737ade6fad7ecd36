"""Ours at the level of the model: `model.gpt2` over `cache.kv`, without scheduler and HTTP."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.cases import Case, Decode, EngineSpec, Prefill
from bench.engines.base import token_ids
from bench.samples import Sample, repeat
from cache.accounting import KV
from cache.kv import KVCache
from engine.limits import Limits
from model.batch import Row
from model.gpt2 import GPT2, cache_shape
from model.weights.source import load_checkpoint

MAX_SESSIONS = 64
PREFILL_CHUNK = Limits().prefill_chunk


class Stepscope:
    """A model and its cache."""

    def __init__(self, model: GPT2, cache: KVCache) -> None:
        self._model = model
        self.cache = cache

    def measure(self, case: Case) -> list[Sample]:
        return self._decode(case) if isinstance(case, Decode) else self._prefill(case)

    def next_id(self, token_ids: Sequence[int]) -> int:
        kv = self._open(len(token_ids))
        try:
            return self._prompt(kv, token_ids)
        finally:
            self.cache.close(kv)

    def _decode(self, case: Decode) -> list[Sample]:
        sessions = [self._open(case.context + 1) for _ in range(case.batch)]
        self._fill(sessions, case.context)
        ids = [[token_id] for token_id in token_ids(case.batch, seed=1)]
        # Nothing advances, so every step is at the same length.
        samples = repeat(lambda: self._step(sessions, ids), case.steps)
        for kv in sessions:
            self.cache.close(kv)
        return samples

    def _prefill(self, case: Prefill) -> list[Sample]:
        kv = self._open(case.n_tokens)
        ids = token_ids(case.n_tokens)

        def begin_anew() -> None:  # the memory too, as for a new session
            self.cache.truncate(kv, 0)
            self.cache.reserve(kv, case.n_tokens)

        samples = repeat(lambda: self._prompt(kv, ids), case.steps, between=begin_anew)
        self.cache.close(kv)
        return samples

    def _open(self, length: int) -> KV:
        kv = self.cache.open()
        self.cache.reserve(kv, length)
        return kv

    def _fill(self, sessions: list[KV], length: int) -> None:
        """Step `length` tokens into the first session and copy its rows to the others."""
        first, *others = sessions
        self._step([first], [token_ids(length)])
        buffers = self.cache.buffers
        for kv in sessions:
            kv.stage(length)
            kv.advance(length)
        for kv in others:
            for rows in (buffers.keys, buffers.values):
                rows[kv.slot, :, :, :length] = rows[first.slot, :, :, :length]

    def _prompt(self, kv: KV, token_ids: Sequence[int]) -> int:
        """A whole prompt, in the chunks that the server would step it in."""
        for first in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[first : first + PREFILL_CHUNK]
            kv.stage(len(chunk))
            self._model.forward([Row(kv=kv, token_ids=chunk)])
            kv.advance(len(chunk))
        return int(np.argmax(self._model.logits([(kv, kv.length - 1)])))

    def _step(self, sessions: list[KV], ids: Sequence[Sequence[int]]) -> list[int]:
        rows = [Row(kv=kv, token_ids=own) for kv, own in zip(sessions, ids, strict=True)]
        for row in rows:
            row.kv.stage(len(row.token_ids))
        self._model.forward(rows)
        logits = self._model.logits([(row.kv, row.positions[-1]) for row in rows])
        best: list[int] = np.argmax(logits, axis=1).tolist()
        return best


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Stepscope:
    torch.set_num_threads(n_threads)
    checkpoint = load_checkpoint(str(directory / "huggingface"), cache_dir=directory)
    shape = cache_shape(checkpoint.config, spec.dtype)
    budget = MAX_SESSIONS * shape.n_ctx * shape.row_bytes
    cache = KVCache(shape, budget_bytes=budget, max_slots=MAX_SESSIONS)
    model = GPT2(checkpoint, cache.buffers, dtype=spec.dtype, max_tokens=shape.n_ctx)
    return Stepscope(model, cache)

"""Ours at the level of the model: `model.gpt2` over `cache.kv`, without scheduler and HTTP."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.cases import Decode, EngineSpec, Prefill
from bench.engines.base import Engine, token_ids
from bench.modes import loaded
from bench.samples import Sample, repeat
from cache.accounting import KV
from cache.kv import KVCache
from engine.limits import Limits
from engine.protocol import Model
from model.batch import Row

PREFILL_CHUNK = Limits().prefill_chunk


class Stepscope(Engine):
    """A model and its cache."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self.cache = cache

    def decode(self, case: Decode) -> list[Sample]:
        sessions = self.filled(case.batch, token_ids(case.context))
        ids = token_ids(case.batch, seed=1)
        # Nothing advances, so every step is at the same length.
        samples = repeat(lambda: self.step(sessions, ids), case.steps)
        self.close_all(sessions)
        return samples

    def prefill(self, case: Prefill) -> list[Sample]:
        kv = self.opened(case.n_tokens)
        ids = token_ids(case.n_tokens)

        def begin_anew() -> None:  # the memory too, as for a new session
            self.cache.truncate(kv, 0)
            self.cache.reserve(kv, case.n_tokens)

        samples = repeat(lambda: self.prompt(kv, ids), case.steps, between=begin_anew)
        self.cache.close(kv)
        return samples

    def next_id(self, token_ids: Sequence[int]) -> int:
        kv = self.opened(len(token_ids))
        try:
            return self.prompt(kv, token_ids)
        finally:
            self.cache.close(kv)

    # What `bench.sharing` is made of, too.

    def opened(self, length: int) -> KV:
        """A session with room for `length` tokens."""
        kv = self.cache.open()
        self.cache.reserve(kv, length)
        return kv

    def filled(self, n: int, token_ids: Sequence[int]) -> list[KV]:
        """`n` sessions that hold the same tokens, each in a place of its own, and room for one."""
        length = len(token_ids)
        first, *others = [self.opened(length + 1) for _ in range(n)]
        self.prompt(first, token_ids)
        buffers = self.cache.buffers
        for kv in others:
            kv.stage(length)
            for rows in (buffers.keys, buffers.values):  # [layer, slot, head, n_ctx, D]
                rows[:, _slot(kv), :, :length] = rows[:, _slot(first), :, :length]
            kv.advance(length)
        return [first, *others]

    def prompt(self, kv: KV, token_ids: Sequence[int]) -> int:
        """A whole prompt, in the chunks that the server would step it in; the id after it."""
        for first in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[first : first + PREFILL_CHUNK]
            kv.stage(len(chunk))
            self._model.forward([Row(kv=kv, token_ids=chunk)])
            kv.advance(len(chunk))
        return int(np.argmax(self._model.logits([(kv, kv.length - 1)])))

    def step(self, sessions: Sequence[KV], token_ids: Sequence[int]) -> list[int]:
        """One token each; the ids after them. The sessions stay as long as they were."""
        for kv in sessions:
            kv.stage(1)
        self._model.forward(
            [Row(kv=kv, token_ids=[one]) for kv, one in zip(sessions, token_ids, strict=True)]
        )
        logits = self._model.logits([(kv, kv.length) for kv in sessions])
        best: list[int] = np.argmax(logits, axis=1).tolist()
        return best

    def close_all(self, sessions: Sequence[KV]) -> None:
        """Give all places back."""
        for kv in sessions:
            self.cache.close(kv)


def _slot(kv: KV) -> int:
    """Where a session lies that shares nothing."""
    (run,) = kv.runs
    return run.slot


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Stepscope:
    parts = loaded(spec, directory, n_threads)
    return Stepscope(parts.model, parts.cache)

"""A model over a cache of its own, stepped by hand: what the engine does, without the engine."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cache.accounting import KV
from cache.kv import KVCache
from model.batch import Captured, Row
from model.gpt2 import GPT2, cache_shape
from model.points import Point, all_points
from model.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]


class Stepping:
    """One model and the sessions that a test steps with it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "float32",
        kv_dtype: str | None = None,
        n_slots: int = 16,
        max_tokens: int = 1024,
    ) -> None:
        shape = cache_shape(checkpoint.config, kv_dtype or _usual_kv_dtype(dtype))
        self.cache = KVCache(shape, budget_bytes=1 << 40, max_slots=n_slots)
        self.model = GPT2(checkpoint, self.cache.buffers, dtype=dtype, max_tokens=max_tokens)
        self.points = tuple(p for p in all_points(checkpoint.config) if p.name != "logits")

    def open(self) -> KV:
        """An empty session with room for all it may hold."""
        kv = self.cache.open()
        self.cache.reserve(kv, self.model.config.n_ctx)
        return kv

    def opened(self, token_ids: Sequence[int]) -> KV:
        """A session that holds `token_ids`."""
        kv = self.open()
        self.step(kv, token_ids)
        return kv

    def open_at(self, slot: int) -> KV:
        """An empty session in a slot of the test's choice."""
        kvs = [self.open()]
        while kvs[-1].slots[0] < slot:
            kvs.append(self.open())
        for kv in kvs[:-1]:
            self.cache.close(kv)
        assert kvs[-1].slots[0] == slot
        return kvs[-1]

    def batch(
        self, rows: Sequence[tuple[KV, Sequence[int]]], *, points: tuple[Point, ...] = ()
    ) -> list[Captured]:
        """One pass over all rows, which are committed; `points` at every token."""
        asked = [
            Row(kv=kv, token_ids=ids, points=points, captured=range(len(ids))) for kv, ids in rows
        ]
        for kv, ids in rows:
            kv.stage(len(ids))
        captured = self.model.forward(asked)
        for kv, ids in rows:
            kv.advance(len(ids))
        return captured

    def step(self, kv: KV, token_ids: Sequence[int]) -> dict[str, Floats]:
        """One session's next tokens alone: every point but `logits`, each [T, C], by name."""
        return named(self.batch([(kv, token_ids)], points=self.points)[0])

    def logits(self, kv: KV, position: int) -> Floats:
        """The row of logits [V] at a cached position."""
        row: Floats = self.model.logits([(kv, position)])[0]
        return row

    def greedy(self, kv: KV, n_new: int) -> list[int]:
        """Step the likeliest id `n_new` times."""
        ids: list[int] = []
        for _ in range(n_new):
            ids.append(int(self.logits(kv, kv.length - 1).argmax()))
            self.batch([(kv, ids[-1:])])
        return ids


def _usual_kv_dtype(dtype: str) -> str:
    return "bfloat16" if dtype == "bfloat16" else "float32"


def named(captured: Captured) -> dict[str, Floats]:
    """Captured points by canonical name."""
    return {str(point): rows for point, rows in captured.items()}


def joined(parts: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """The points of consecutive appends, as if they had been one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

"""A model over a cache of its own, stepped by hand: what the engine does, without the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from cache.accounting import KV
from cache.kv import KVCache
from model.batch import Captured, Floats, Row
from model.gpt2 import GPT2, cache_shape
from model.points import Point, all_points
from model.weights.checkpoint import Checkpoint
from sessions.edits import StepEdits
from tests.agreement import assert_agrees


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
        self,
        rows: Sequence[tuple[KV, Sequence[int]]],
        *,
        points: tuple[Point, ...] = (),
        edits: Mapping[int, StepEdits] | None = None,
    ) -> list[Captured]:
        """One pass over all rows, which are committed; `points` at every token.

        `edits` of the first row, by position.
        """
        asked = [
            Row(kv=kv, token_ids=ids, points=points, captured=range(len(ids))) for kv, ids in rows
        ]
        asked[0] = edited(asked[0], edits or {})
        for kv, ids in rows:
            kv.stage(len(ids))
        captured = self.model.forward(asked)
        for kv, ids in rows:
            kv.advance(len(ids))
        return captured

    def step(
        self, kv: KV, token_ids: Sequence[int], *, edits: Mapping[int, StepEdits] | None = None
    ) -> dict[str, Floats]:
        """One session's next tokens alone: every one of `points`, by name."""
        return named(self.batch([(kv, token_ids)], points=self.points, edits=edits)[0])

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


def edited(row: Row, edits: Mapping[int, StepEdits]) -> Row:
    """The row with those of `edits`, by position, that are of its tokens."""
    first = row.positions.start
    return replace(row, edits={p - first: edits[p] for p in row.positions if p in edits})


def named(captured: Captured) -> dict[str, Floats]:
    """Captured points by canonical name, each [T, ...]; `scores` and `pattern` an array of rows."""
    return {str(point): _stacked(point, rows) for point, rows in captured.items()}


def joined(parts: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """The points of consecutive appends, as if they had been one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _stacked(point: Point, rows: Sequence[Floats]) -> Floats:
    if "key" not in point.axes:
        return np.asarray(rows)
    stacked = np.empty(len(rows), object)
    stacked[:] = rows
    return stacked


def assert_seen_agrees(
    seen: Mapping[str, Floats], expected: Mapping[str, Tensor], positions: Sequence[int]
) -> None:
    """Fail where what was seen at `positions` is not what the reference has there."""
    for name, rows in seen.items():
        assert len(rows) == len(positions), name
        whole, _, units = name.partition("[")
        theirs = expected[whole].numpy()[list(positions)]
        if units:
            chosen = [int(unit) for unit in units[:-1].split(",")]
            theirs = theirs[:, chosen]
        if rows.dtype == object:
            for row, own, position in zip(rows, theirs, positions, strict=True):
                own = own[:, : position + 1]
                masked = np.isneginf(own)
                assert np.array_equal(np.isneginf(row), masked), f"{name} at {position}"
                assert_agrees(row[~masked], own[~masked], what=f"{name} at {position}")
        else:
            assert_agrees(rows, theirs, what=name)


def assert_same_bits(seen: Mapping[str, Floats], other: Mapping[str, Floats]) -> None:
    """Fail where the same points do not have the same bytes."""
    assert seen.keys() == other.keys()
    for name, rows in seen.items():
        bits = [[row.tobytes() for row in each] for each in (rows, other[name])]
        assert bits[0] == bits[1], name

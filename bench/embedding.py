"""The embedding step alone: `wte[X] + wpe[p]` as commonly written, ours, and a copy of the bytes.

`python -m bench.embedding` prints a table. The three take turns on one thread; each turn is a pass
over ids that differ from call to call, so that rows are cold as in real use, while the copy's are
warm. Times are medians per call. The naive form is given ready index tensors; ours begins with the
engine's Python integers.

Shapes: B rows of sessions, T tokens each, C width.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from embedding.lookup import Embedder
from embedding.tables import EmbeddingTables, fresh

N_INPUTS = 64  # distinct inputs per shape, visited in turn
Row = dict[str, str | float]


class Shape(NamedTuple):
    """A step of `n_rows` sessions with `n_tokens` each, and the rounds that time it."""

    n_rows: int
    n_tokens: int
    n_rounds: int

    def __str__(self) -> str:
        return f"{self.n_rows}x{self.n_tokens}"


SHAPES = (
    Shape(1, 1, 100),
    Shape(16, 1, 60),
    Shape(64, 1, 30),
    Shape(1, 128, 20),
    Shape(1, 1023, 5),
)


class Input(NamedTuple):
    """One step's tokens and positions, flattened over sessions, in both forms."""

    token_ids: list[int]
    positions: list[int]
    ids: torch.Tensor
    p: torch.Tensor


def main() -> list[Row]:
    """Measure every shape on gpt2's tables, print the table, return its rows."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tables = fresh(n_vocab=50257, n_ctx=1024, n_embd=768, generator=_seeded())
        rows = [measure(tables, shape) for shape in SHAPES]
    finally:
        torch.set_num_threads(n_threads)
    Console().print(_table(rows))
    return rows


def measure(tables: EmbeddingTables, shape: Shape) -> Row:
    """Median microseconds per call of each way, and their ratios."""
    inputs = [_input(shape, tables, seed) for seed in range(N_INPUTS)]
    ways = {
        "naive": _naive(tables, shape),
        "ours": _ours(tables, shape),
        "memcpy": _memcpy(tables, shape),
    }
    with torch.inference_mode():
        naive, ours, memcpy = _interleaved(list(ways.values()), inputs, shape.n_rounds)
    return {
        "shape": str(shape),
        "naive_us": naive,
        "ours_us": ours,
        "memcpy_us": memcpy,
        "naive/ours": naive / ours,
        "ours/memcpy": ours / memcpy,
    }


Way = Callable[[Input], object]


def _naive(tables: EmbeddingTables, shape: Shape) -> Way:
    wte, wpe = tables.wte, tables.wpe
    if shape.n_rows > 1:
        return lambda step: wte[step.ids] + wpe[step.p]
    return lambda step: wte[step.ids] + wpe[step.positions[0] : step.positions[-1] + 1]


def _ours(tables: EmbeddingTables, shape: Shape) -> Way:
    embedder = Embedder(tables, max_tokens=shape.n_rows * shape.n_tokens)
    if shape.n_rows > 1:
        return lambda step: embedder.ragged(step.token_ids, step.positions)
    return lambda step: embedder.one(step.token_ids, step.positions[0])


def _memcpy(tables: EmbeddingTables, shape: Shape) -> Way:
    n_tokens = shape.n_rows * shape.n_tokens
    source = torch.zeros(n_tokens, tables.n_embd)
    target = torch.empty(n_tokens, tables.n_embd)
    return lambda _: target.copy_(source)


def _interleaved(ways: Sequence[Way], inputs: Sequence[Input], n_rounds: int) -> list[float]:
    samples: list[list[int]] = [[] for _ in ways]
    for _ in range(n_rounds):
        for way, times in zip(ways, samples, strict=True):
            for step in inputs:
                begin = time.perf_counter_ns()
                way(step)
                times.append(time.perf_counter_ns() - begin)
    return [statistics.median(times) / 1000 for times in samples]


def _input(shape: Shape, tables: EmbeddingTables, seed: int) -> Input:
    generator = _seeded(seed)
    last = tables.n_ctx - shape.n_tokens
    ids = torch.randint(tables.n_vocab, (shape.n_rows * shape.n_tokens,), generator=generator)
    past_lengths = torch.randint(last + 1, (shape.n_rows, 1), generator=generator)
    index = (past_lengths + torch.arange(shape.n_tokens)).flatten()
    return Input(ids.tolist(), index.tolist(), ids, index)


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Embedding step, BxT, one thread, medians")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (value if isinstance(value, str) else f"{value:.2f}" for value in row.values())
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()

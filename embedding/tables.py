"""The two tables of GPT-2's input: `wte`, a row per token, and `wpe`, a row per position.

Any thread: they are never written after loading. `wte` is also the output matrix, as one tensor.
Source: Radford et al. 2019; openai/gpt-2 `src/model.py`, `model()`, whose two initialisers differ.

Shapes: V vocabulary, C width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WTE_STD = 0.02
WPE_STD = 0.01


@dataclass(frozen=True, eq=False, slots=True)
class EmbeddingTables:
    """Two contiguous float32 tables of the same width on the CPU."""

    wte: Tensor  # [V, C]
    wpe: Tensor  # [n_ctx, C]

    def __post_init__(self) -> None:
        for table in (self.wte, self.wpe):
            assert table.ndim == 2, f"a table has two axes, not {table.ndim}"
            assert table.dtype == torch.float32, f"a table is float32, not {table.dtype}"
            assert table.is_contiguous(), "a table is contiguous"
        assert self.wte.shape[1] == self.wpe.shape[1], "the tables have one width"

    @property
    def n_vocab(self) -> int:
        """Rows of `wte`."""
        return self.wte.shape[0]

    @property
    def n_ctx(self) -> int:
        """Rows of `wpe`."""
        return self.wpe.shape[0]

    @property
    def n_embd(self) -> int:
        """Width of both."""
        return self.wte.shape[1]


def fresh(*, n_vocab: int, n_ctx: int, n_embd: int, generator: torch.Generator) -> EmbeddingTables:
    """Untrained tables: `wte ~ N(0, 0.02²)`, `wpe ~ N(0, 0.01²)`, drawn in this order."""
    wte = torch.empty(n_vocab, n_embd).normal_(0, WTE_STD, generator=generator)
    wpe = torch.empty(n_ctx, n_embd).normal_(0, WPE_STD, generator=generator)
    return EmbeddingTables(wte, wpe)

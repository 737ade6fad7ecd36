"""`h[t] = wte[ids[t]] + wpe[past_length + t]`: no scale, no dropout, bit-equal to the rows added.

`embed` and `embed_parts` are stateless, for any thread; an `Embedder` belongs to the model thread.
Source: openai/gpt-2 `src/model.py`, `model()`; Radford et al. 2019, section 2.3.

Fast because rows are copied whole, where `wte[ids]` runs a general index kernel; consecutive
positions are a slice of `wpe`, never an index; and no row is allocated per step. numpy's `take` on
the tables' own memory measured faster than `torch.index_select(out=)` at every size from 1 to 1023.

Shapes: T tokens, N rows of several sessions, C width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embedding.ids import check_ids
from embedding.positions import check_positions, positions_for
from embedding.tables import EmbeddingTables


class EmbeddingParts(NamedTuple):
    """The two looked-up rows of each token, and their sum. float32."""

    wte: Tensor  # [T, C]
    wpe: Tensor  # [T, C], a view of the table: read only
    embedding: Tensor  # [T, C]


def embed(tables: EmbeddingTables, token_ids: Sequence[int], past_length: int) -> Tensor:
    """Embeddings [T, C] of tokens at positions `past_length`, `past_length + 1`, ...

    Raises:
        PositionOverflow: they would pass the last row of `wpe`.
        TokenIdOutOfRange: an id is no row of `wte`.
    """
    return embed_parts(tables, token_ids, past_length).embedding


def embed_parts(
    tables: EmbeddingTables, token_ids: Sequence[int], past_length: int
) -> EmbeddingParts:
    """As `embed`, with the rows that were added."""
    positions = positions_for(past_length, len(token_ids), tables.n_ctx)
    check_ids(token_ids, tables.n_vocab)
    wte = tables.wte.index_select(0, torch.tensor(token_ids, dtype=torch.int64))  # [T, C]
    wpe = tables.wpe[positions.start : positions.stop]  # [T, C]
    return EmbeddingParts(wte, wpe, wte + wpe)


class Embedder:
    """The lookup of the model thread: up to `max_tokens` rows at once, into one buffer.

    A returned tensor is valid until the next call.
    """

    def __init__(self, tables: EmbeddingTables, max_tokens: int) -> None:
        self._n_vocab, self._n_ctx = tables.n_vocab, tables.n_ctx
        self._wte, self._wpe = tables.wte.numpy(), tables.wpe.numpy()  # views, no copies
        self._ids = np.empty(max_tokens, dtype=np.int64)  # [N]
        self._positions = np.empty(max_tokens, dtype=np.int64)  # [N]
        self._rows = np.empty((max_tokens, tables.n_embd), dtype=np.float32)  # [N, C]
        self._wpe_rows = np.empty_like(self._rows)  # [N, C]
        self._out = torch.from_numpy(self._rows)  # [N, C]
        self._out_first = self._out[:1]  # [1, C]

    def one(self, token_ids: Sequence[int], past_length: int) -> Tensor:
        """Embeddings [T, C] of one session's next tokens.

        Raises:
            PositionOverflow: they would pass the last row of `wpe`.
            TokenIdOutOfRange: an id is no row of `wte`.
        """
        n_tokens = len(token_ids)
        positions = positions_for(past_length, n_tokens, self._n_ctx)
        check_ids(token_ids, self._n_vocab)
        if n_tokens == 1:  # the decode step
            np.add(self._wte[token_ids[0]], self._wpe[past_length], out=self._rows[0])
            return self._out_first
        rows = self._take_wte(token_ids)
        np.add(rows, self._wpe[positions.start : positions.stop], out=rows)
        return self._out[:n_tokens]

    def ragged(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Embeddings [N, C] of rows at any positions, such as those of several sessions.

        Raises:
            PositionOverflow: a position is no row of `wpe`.
            TokenIdOutOfRange: an id is no row of `wte`.
        """
        n_rows = len(token_ids)
        assert len(positions) == n_rows, "one position per token"
        check_positions(positions, self._n_ctx)
        check_ids(token_ids, self._n_vocab)
        self._positions[:n_rows] = positions
        wpe_rows = self._wpe_rows[:n_rows]
        self._wpe.take(self._positions[:n_rows], 0, wpe_rows, "clip")
        rows = self._take_wte(token_ids)
        np.add(rows, wpe_rows, out=rows)
        return self._out[:n_rows]

    def _take_wte(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        n_tokens = len(token_ids)
        self._ids[:n_tokens] = token_ids
        rows = self._rows[:n_tokens]
        # "clip" never clips here, ids were checked; the default mode copies through a buffer.
        return self._wte.take(self._ids[:n_tokens], 0, rows, "clip")

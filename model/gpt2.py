"""GPT-2's forward pass over the cache. Torch; the model thread.

Pre-norm blocks, written as functions of the checkpoint's tensors: no module tree, no autograd.
One pass steps any mix of rows, one token or many, and leaves each position's keys, values and
`ln_f` row in the cache. Logits are read from `ln_f` rows afterwards, only where they are needed.

Source: Radford et al. 2019, section 2.3; openai/gpt-2 `src/model.py` (`model`, `block`, `norm`),
whose names the tensors keep.
Legend: N tokens of the batch, C width, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cache.accounting import KV
from cache.buffers import KVBuffers, Shape
from embedding.lookup import Embedder, embed_parts
from embedding.tables import EmbeddingTables
from model.attention.attention import Attention
from model.attention.exact import ExactAttention
from model.attention.fused import FusedAttention
from model.attention.plan import Plan, in_order
from model.batch import Captured, Row
from model.capture import Taps
from model.config import GPT2Config
from model.errors import NonFiniteHidden
from model.precision.base import Precision, Product
from model.precision.exact import Exact
from model.precision.modes import PRECISIONS
from model.weights.checkpoint import Checkpoint

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The functions of one layer."""

    ln_1: Norm
    c_attn: Product
    attn_proj: Product
    ln_2: Norm
    c_fc: Product
    mlp_proj: Product


KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cache_shape(config: GPT2Config, kv_dtype: str) -> Shape:
    """The layout of the K/V buffers for a model of this shape."""
    return Shape(
        n_ctx=config.n_ctx,
        n_layer=config.n_layer,
        n_head=config.n_head,
        d_head=config.d_head,
        dtype=KV_DTYPES[kv_dtype],
    )


class GPT2:
    """One checkpoint, ready to step sessions whose places are in `buffers`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        buffers: KVBuffers,
        *,
        dtype: str,
        max_tokens: int,
        batch_invariant: bool = False,
    ) -> None:
        """Prepare the products. One pass takes at most `max_tokens` tokens in all its rows.

        `batch_invariant`, in float32 only: a row's bits do not depend on its company. The pieces of
        its cache are whole blocks of `model.attention.exact`.
        """
        precision = Exact() if batch_invariant else PRECISIONS[dtype]()
        kernel = ExactAttention(buffers) if batch_invariant else FusedAttention(buffers)
        tensors, config = checkpoint.tensors, checkpoint.config
        self.config = config
        self.dtype = dtype
        self.tables = EmbeddingTables(tensors["wte.weight"], tensors["wpe.weight"])
        self._compute_dtype = precision.dtype
        self._buffers = buffers
        self._embedder = Embedder(self.tables, max_tokens)
        self._attention = Attention(buffers, kernel)
        self._blocks = [_block(tensors, i, config, precision) for i in range(config.n_layer)]
        self._ln_f = _norm(tensors, "ln_f", config)
        self._head = precision.head(self.tables.wte)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Captured]:
        """Step every row's tokens; returns each row's captured points, in the order of `rows`.

        Writes rows kv.length.. of keys, values and `ln_f`; `kv.length` itself is the caller's to
        advance, so a pass that fails changes nothing that counts.

        Raises:
            NonFiniteHidden: a token's `ln_f` row holds an infinity or a NaN.
        """
        order = in_order(rows)
        rows = [rows[i] for i in order]
        taps = Taps(rows)
        x = self._embed(rows, taps)
        plan = self._attention.plan(rows)
        hidden = self._hidden(x, plan, taps)
        self._keep(hidden, plan)
        return taps.by_row(order)

    def _embed(self, rows: Sequence[Row], taps: Taps) -> Tensor:
        if len(rows) == 1:
            x = self._embedder.one(rows[0].token_ids, rows[0].kv.length)
        else:
            ids = [token_id for row in rows for token_id in row.token_ids]
            x = self._embedder.ragged(ids, [p for row in rows for p in row.positions])
        taps.look_up("wte", self.tables.wte, lambda row: row.token_ids)
        taps.look_up("wpe", self.tables.wpe, lambda row: row.positions)
        taps.take("embedding", None, x)
        return x

    def _hidden(self, x: Tensor, plan: Plan, taps: Taps) -> Tensor:
        """The residual stream through all blocks, x [N, C], to the `ln_f` rows [N, C]."""
        for layer, block in enumerate(self._blocks):
            taps.take("resid_pre", layer, x)
            qkv = block.c_attn(block.ln_1(x).to(self._compute_dtype))  # [N, 3C]
            x.add_(block.attn_proj(self._attention(layer, qkv, plan)))
            neurons = block.c_fc(block.ln_2(x).to(self._compute_dtype))  # [N, 4C], after GELU
            x.add_(block.mlp_proj(neurons))
            taps.take("resid_post", layer, x)
        hidden = self._ln_f(x)
        taps.take("ln_f", None, hidden)
        return hidden

    def _keep(self, hidden: Tensor, plan: Plan) -> None:
        if not torch.isfinite(hidden.sum()):
            raise NonFiniteHidden
        self._buffers.ln_f[plan.slots, plan.positions] = hidden

    def look_up(self, row: Row) -> Captured:
        """The points of `row`, all of them looked up, without stepping its tokens."""
        if not row.captured:
            return {}
        parts = embed_parts(self.tables, row.token_ids, row.kv.length)
        by_name = parts._asdict() | {"resid_pre": parts.embedding}  # of layer 0: the same tensor
        captured = list(row.captured)
        return {point: by_name[point.name][captured].numpy() for point in row.points}

    @torch.inference_mode()
    def logits(self, wanted: Sequence[tuple[KV, int]]) -> npt.NDArray[np.float32]:
        """Logits [n, V] at `wanted` positions, each scoring the token after it.

        One product, so the caller bounds n: a row of the GPT-2 vocabulary is 201 kB.
        """
        slots = [kv.slot_of(position) for kv, position in wanted]
        positions = [position for _, position in wanted]
        logits: npt.NDArray[np.float32] = self._head(self._buffers.ln_f[slots, positions]).numpy()
        return logits


def _block(
    tensors: Mapping[str, Tensor], layer: int, config: GPT2Config, precision: Precision
) -> Block:
    def parts(name: str) -> tuple[Tensor, Tensor]:
        key = f"h.{layer}.{name}"
        return tensors[f"{key}.weight"], tensors[f"{key}.bias"]

    return Block(
        ln_1=_norm(tensors, f"h.{layer}.ln_1", config),
        c_attn=precision.linear(*parts("attn.c_attn")),
        attn_proj=precision.linear(*parts("attn.c_proj")),
        ln_2=_norm(tensors, f"h.{layer}.ln_2", config),
        c_fc=precision.linear_gelu(*parts("mlp.c_fc")),
        mlp_proj=precision.linear(*parts("mlp.c_proj")),
    )


def _norm(tensors: Mapping[str, Tensor], name: str, config: GPT2Config) -> Norm:
    gain, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    shape, eps = (config.n_embd,), config.layer_norm_epsilon
    return lambda x: F.layer_norm(x, shape, gain, bias, eps)

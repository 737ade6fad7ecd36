"""GPT-2's forward pass over the cache. Torch; the model thread.

Pre-norm blocks over a cache. One pass steps any mix of rows, one token or many, and leaves each
position's keys, values and `ln_f` row in the cache. Rows whose tokens are in the cache already are
computed beside them and leave nothing. Logits are read from `ln_f` rows afterwards, only where they
are needed.

Source: Radford et al. 2019, section 2.3; openai/gpt-2 `src/model.py` (`model`, `block`, `norm`),
whose names the tensors keep.
Legend: N tokens of the batch, C width, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cache.accounting import KV
from cache.buffers import KVBuffers, Shape
from embedding.lookup import Embedder, embed
from embedding.tables import EmbeddingTables
from model.attention.attention import Attention
from model.attention.explicit import ExplicitAttention
from model.attention.fused import FusedAttention
from model.attention.plan import Plan, in_order
from model.batch import Captured, Floats, Row
from model.block import Block, LayerNorm
from model.capture import Sheets
from model.config import GPT2Config
from model.edits import Changes
from model.errors import NonFiniteHidden
from model.hooks import Hooks
from model.precision.exact import Exact
from model.precision.modes import PRECISIONS
from model.weights.checkpoint import Checkpoint

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LARGEST_KEPT = 1e30  # of the keys and values of an edited token: no product with a query overflows
_ROUNDING = 8  # a packed head takes the mean row apart and rounds the rest: never that much more


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
        its cache are whole blocks of `model.attention.explicit`.
        """
        precision = Exact() if batch_invariant else PRECISIONS[dtype]()
        kernel = ExplicitAttention(buffers) if batch_invariant else FusedAttention(buffers)
        tensors, config = checkpoint.tensors, checkpoint.config
        self.config = config
        self.dtype = dtype
        self.tables = EmbeddingTables(tensors["wte.weight"], tensors["wpe.weight"])
        self.parameters = _held(tensors, but_packed=precision.packs)
        self._buffers = buffers
        self._embedder = Embedder(self.tables, max_tokens)
        self._attention = Attention(buffers, kernel)
        self._blocks = [
            Block(tensors, layer, config, precision, self._attention)
            for layer in range(config.n_layer)
        ]
        self._ln_f = LayerNorm(tensors, "ln_f", config)
        self._head = precision.head(self.tables.wte)
        self._largest = _largest_hidden(self.tables.wte)
        self._changes = Changes(config)
        self._sheets = Sheets(config)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Captured]:
        """Step every row's tokens; returns each row's captured points, in the order of `rows`.

        Writes rows kv.length.. of keys, values and `ln_f`; `kv.length` itself is the caller's to
        advance, so a pass that fails changes nothing that counts. Writes nothing for rows that are
        read again.

        Raises:
            NonFiniteHidden: a token's `ln_f` row, or what an edit made, holds an infinity or a NaN,
                or what follows from it could.
        """
        order = in_order(rows)
        rows = [rows[i] for i in order]
        hooks = self._hooks(rows)
        x = self._embed(rows, hooks)
        plan = self._attention.plan(rows)
        for layer, block in enumerate(self._blocks):
            block(x, plan, hooks)
            self._look_ahead(layer, x, hooks)
        self._finish(x, plan, hooks)
        return hooks.by_row(order)

    def _hooks(self, rows: Sequence[Row]) -> Hooks:
        return Hooks(rows, self._changes, self._sheets)

    def _embed(self, rows: Sequence[Row], hooks: Hooks) -> Tensor:
        if len(rows) == 1:
            x = self._embedder.one(rows[0].token_ids, rows[0].positions.start)
        else:
            ids = [token_id for row in rows for token_id in row.token_ids]
            x = self._embedder.ragged(ids, [p for row in rows for p in row.positions])
        self._look_at_tables(x, rows, hooks)
        return x

    def _look_at_tables(self, x: Tensor, rows: Sequence[Row], hooks: Hooks) -> None:
        """The points before the blocks; x [N, C] is the sum of the rows that were looked up."""
        part = hooks.part(None, "wte", "wpe")
        if part:
            ids = [token_id for row in rows for token_id in row.token_ids]
            positions = [p for row in rows for p in row.positions]
            wte = self.tables.wte[[ids[token] for token in part.tokens]]
            wpe = self.tables.wpe[[positions[token] for token in part.tokens]]
            hooks.at("wte", None, wte, part)
            hooks.at("wpe", None, wpe, part)
            x[part.changed] = (wte + wpe)[part.edited]
        hooks.at("embedding", None, x)

    def _look_ahead(self, layer: int, x: Tensor, hooks: Hooks) -> None:
        """What the head would be given if this layer were the last."""
        part = hooks.part(layer, "lens")
        if part:
            hooks.at("lens", layer, self._ln_f.plain(x[part.tokens]), part)

    def _finish(self, x: Tensor, plan: Plan, hooks: Hooks) -> None:
        """The `ln_f` rows of the residual stream x [N, C], into the cache."""
        hidden, kept = self._ln_f.computed(x, hooks), self._buffers.ln_f
        if plan.again:
            hidden[plan.again] = kept[plan.slots[plan.again], plan.positions[plan.again]]
        hooks.at("ln_f", None, hidden)
        _check(hidden, self._largest)
        if edited := hooks.edited:
            self._check_kept(plan.slots[edited], plan.positions[edited])
        new = plan.written
        kept[plan.slots[new], plan.positions[new]] = hidden[new]

    def _check_kept(self, slots: Tensor, positions: Tensor) -> None:
        """See that keys and values can be read by all that may: an edit can heal what is after."""
        for kept in (*self._buffers.keys, *self._buffers.values):
            _check(kept[slots, :, positions], _LARGEST_KEPT)

    @torch.inference_mode()
    def look_up(self, row: Row) -> Captured:
        """The points of `row`, all of them looked up, without stepping its tokens."""
        if not row.captured:
            return {}
        hooks = self._hooks([row])
        x = embed(self.tables, row.token_ids, row.positions.start)
        self._look_at_tables(x, [row], hooks)
        hooks.at("resid_pre", 0, x)
        return hooks.by_row([0])[0]

    @torch.inference_mode()
    def logits(self, wanted: Sequence[tuple[KV, int]], hidden: Floats | None = None) -> Floats:
        """Logits [n + m, V] at n `wanted` positions, and of `hidden` rows [m, C].

        Each row scores the token after it. One product, so the caller bounds n and m: a row of the
        GPT-2 vocabulary is 201 kB.
        """
        slots = [kv.slot_of(position) for kv, position in wanted]
        positions = [position for _, position in wanted]
        rows = self._buffers.ln_f[slots, positions]
        if hidden is not None:
            rows = torch.cat((rows, torch.from_numpy(hidden)))
        logits: Floats = self._head(rows).numpy()
        return logits


def _check(x: Tensor, largest: float) -> None:
    """Raises NonFiniteHidden if a number is larger, or none."""
    low, high = x.aminmax()
    if not (-largest <= low and high <= largest):  # as nothing does with a NaN
        raise NonFiniteHidden


def _largest_hidden(wte: Tensor) -> float:
    """What no number of an `ln_f` row may pass, so that no sum in its logits overflows.

    |x . w| <= max|x| * sum|w|. Rows of trained models are 1e30 times smaller.
    """
    sums = torch.linalg.vector_norm(wte, ord=1, dim=1)  # [V]
    return torch.finfo(wte.dtype).max / max(1.0, _ROUNDING * float(sums.max()))


def _held(tensors: Mapping[str, Tensor], *, but_packed: bool) -> Mapping[str, Tensor]:
    """The checkpoint's tensors that a model keeps: a packed matrix is not kept twice."""
    tables = ("wte.weight", "wpe.weight")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not but_packed or tensor.dim() == 1 or name in tables
    }

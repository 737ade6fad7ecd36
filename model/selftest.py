"""Looks whether exact mode is exact on this machine. Torch; the loading thread, once.

That a row has the same bits in any company is how the kernels behind `model.precision.exact` and
`model.attention.explicit` were found to work, not what their makers promise: another processor,
library or number of threads may do otherwise. So each product is compared with itself at the
model's real shapes and the threads in use, and a model of one layer with itself over chunks,
company and forks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Generator, Tensor

from cache.accounting import KV
from cache.kv import KVCache
from model.attention.explicit import PIECE
from model.batch import Row
from model.errors import NotExact
from model.gpt2 import GPT2, cache_shape
from model.precision.base import Precision, Product
from model.precision.exact import Exact
from model.weights.checkpoint import Checkpoint

_ROWS = (1, 2, 3, 4, 15, 16, 64, 385, 600)  # of a product
_HEAD_ROWS = 64  # logits are asked for in slices of that many
_TOKENS = 450  # of a history: past where kernels begin to split sums
_CHUNKS = (1, 2, 3, 4, 15, 16, 64)  # it is cut into these, and the rest


def prove_exact(checkpoint: Checkpoint) -> None:
    """Compare what must be equal, in about a second for gpt2.

    Raises:
        NotExact: a bit differs.
    """
    with torch.inference_mode():
        for name, product, n_in in _products(checkpoint, Exact()):
            _prove_product(name, product, n_in)
        _OneLayer(checkpoint).prove()


def _products(checkpoint: Checkpoint, precision: Precision) -> Iterator[tuple[str, Product, int]]:
    """The products of the first layer by name, with the width of their input."""
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        weight, bias = (checkpoint.tensors[f"h.0.{name}.{part}"] for part in ("weight", "bias"))
        if name == "mlp.c_fc":
            neurons = precision.neurons(weight, bias)
            yield name, neurons, len(weight)
            yield f"{name} before GELU", neurons.linear, len(weight)
        else:
            yield name, precision.linear(weight, bias), len(weight)


def _prove_product(name: str, product: Product, n_in: int) -> None:
    """Rows are the same bits however many there are."""
    x = torch.randn(max(_ROWS), n_in, generator=Generator().manual_seed(0))
    y = product(x)
    for n in _ROWS:
        if not same_bits(product(x[-n:]), y[-n:]):
            raise NotExact(f"{name} in a batch of {n}")


class _OneLayer:
    """The first layer between the real embedding and head, with a cache of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = replace(checkpoint.config, n_layer=1)
        shape = cache_shape(config, "float32")
        self._cache = KVCache(shape, budget_bytes=1 << 40, max_slots=8, piece=PIECE)
        self._buffers = self._cache.buffers
        self._model = GPT2(
            Checkpoint(config, checkpoint.tensors, checkpoint.source),
            self._buffers,
            dtype="float32",
            max_tokens=config.n_ctx,
            batch_invariant=True,
        )
        # To the end of a context that is no multiple of a piece: its last block is an odd one.
        n_tokens = config.n_ctx if config.n_ctx % PIECE else min(_TOKENS, config.n_ctx)
        self._token_ids = np.random.default_rng(0).integers(config.n_vocab, size=n_tokens).tolist()

    def prove(self) -> None:
        """One history: in one pass, in chunks beside mates, and behind a fork."""
        whole = self._cache.open()
        self._step([whole], len(self._token_ids))
        self._prove_head(whole)
        chunked, child = self._cache.open(), self._cache.fork(whole, whole.length // 2)
        mates = [self._cache.open() for _ in range(3)]
        for kv, what in ((chunked, "a history in chunks"), (child, "what follows a fork")):
            for size in (*_CHUNKS, len(self._token_ids)):
                self._step([kv, *mates], size)
            for own in (kv, *mates):
                if not same_bits(self._rows(own), self._rows(whole)[: own.length]):
                    raise NotExact(f"attention in {what}")

    def _prove_head(self, whole: KV) -> None:
        positions = range(min(_HEAD_ROWS, whole.length))
        logits = self._logits(whole, positions)
        for n in (n for n in _ROWS if n <= len(positions)):
            if not same_bits(self._logits(whole, positions[-n:]), logits[-n:]):
                raise NotExact(f"wte in a batch of {n}")

    def _logits(self, kv: KV, positions: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._model.logits([(kv, p) for p in positions]))

    def _rows(self, kv: KV) -> Tensor:
        """The `ln_f` rows [T, C] of a place."""
        return self._buffers.ln_f[[kv.slot_of(p) for p in range(kv.length)], range(kv.length)]

    def _step(self, kvs: Sequence[KV], n_first: int) -> None:
        """Step the next tokens of each: `n_first` of the first place, one of the others."""
        rows = []
        for kv in kvs:
            stop = kv.length + (n_first if kv is kvs[0] else 1)
            rows.append(Row(kv=kv, token_ids=self._token_ids[kv.length : stop]))
        rows = [row for row in rows if row.token_ids]
        for row in rows:
            self._cache.reserve(row.kv, row.positions.stop)
            row.kv.stage(len(row.token_ids))
        self._model.forward(rows)
        for row in rows:
            row.kv.advance(len(row.token_ids))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors are equal bit for bit."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))

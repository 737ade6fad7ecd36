"""float32 products whose rows have the same bits however many there are. Torch; the model thread.

oneDNN's kernel for packed weights sums a row's terms in one order, whatever the other rows are
and however many threads share them. Only a row that is alone and long falls to another one, so it
is given company.
(MKL's products, those of `Float32`, sum in an order that depends on the number of rows.)
That is how it was found to be, not what it promises: `model.selftest` looks before it is relied on.
"""

import torch
from torch import Tensor

from model.precision.base import Neurons, Product

_PACKED_ROWS = 64  # the row count that the packed layout is tuned for; any count is right
_TERMS = 1024  # past that, one row alone is summed in two parts


class Exact:
    """Products, K/V and everything else in float32, with the same bits in any batch."""

    dtype = torch.float32
    packs = True

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        return _product(*_packed(weight.t()), bias)

    def neurons(self, weight: Tensor, bias: Tensor) -> Neurons:
        """See `Precision.neurons`.

        GELU is part of the product: alone it rounds the last elements of a thread's share in
        another way than those before them.
        """
        packed = _packed(weight.t())
        fused = _product(*packed, bias, "gelu", "tanh")
        return Neurons(linear=_product(*packed, bias), fused=fused)

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`."""
        return _product(*_packed(wte), None)


def _packed(weight: Tensor) -> tuple[Tensor, int]:
    """A packed copy of weight [out, in], and the least rows that it is multiplied with."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
    return packed, 1 if weight.size(1) <= _TERMS else 2


def _product(
    packed: Tensor, least: int, bias: Tensor | None, after: str = "none", algorithm: str = ""
) -> Product:
    linear = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor) -> Tensor:
        rows = x if len(x) >= least else x.expand(least, -1).contiguous()
        y: Tensor = linear(rows, packed, bias, after, [], algorithm)
        return y[: len(x)]

    return product

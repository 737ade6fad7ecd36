"""float32 products whose rows have the same bits however many there are. Torch; the model thread.

oneDNN's kernel for packed weights sums a row's terms in one order, whatever the other rows are
and however many threads share them. Only a row that is alone and long falls to another one, so it
is given company.
(MKL's products, those of `Float32`, sum in an order that depends on the number of rows.)
That is how it was found to be, not what it promises: `model.selftest` looks before it is relied on.
"""

import torch
from torch import Tensor

from model.precision.base import Product

_PACKED_ROWS = 64  # the row count that the packed layout is tuned for; any count is right
_TERMS = 1024  # past that, one row alone is summed in two parts


class Exact:
    """Products, K/V and everything else in float32, with the same bits in any batch."""

    dtype = torch.float32

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        return _packed(weight.t(), bias)

    def linear_gelu(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear_gelu`.

        GELU is part of the product: alone it rounds the last elements of a thread's share in
        another way than those before them.
        """
        return _packed(weight.t(), bias, "gelu", "tanh")

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`."""
        return _packed(wte, None)


def _packed(
    weight: Tensor, bias: Tensor | None, after: str = "none", algorithm: str = ""
) -> Product:
    """A product with a packed copy of weight [out, in]."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise
    least = 1 if weight.size(1) <= _TERMS else 2

    def product(x: Tensor) -> Tensor:
        rows = x if len(x) >= least else x.expand(least, -1).contiguous()
        y: Tensor = linear(rows, packed, bias, after, [], algorithm)
        return y[: len(x)]

    return product

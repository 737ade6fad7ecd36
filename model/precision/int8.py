"""int8 products, float32 around them. Torch; the model thread.

A weight has one scale per output channel; an activation has one scale per row, from that row's own
largest entry. The sums are of whole numbers, so no order of summation can change them: a row has
the same bits whatever rows it is multiplied with. The residual stream, layer norms, attention,
GELU, `ln_f` rows, embedding and logits stay float32.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from model.precision.base import Neurons, Product

_LARGEST = 127  # of a quantized activation, and of a weight where sums have room for it
_LARGEST_WITHOUT_VNNI = 63
_ZERO = 128  # oneDNN takes activations as uint8, moved up by this
_SMALLEST_ROW = 1e-30  # a row of zeros has a scale too


class Int8:
    """Weights and what enters a product in int8; what comes out in float32."""

    dtype = torch.float32
    packs = True

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        product = _product(weight.t())
        return lambda x: product(x).add_(bias)

    def neurons(self, weight: Tensor, bias: Tensor) -> Neurons:
        """See `Precision.neurons`."""
        return Neurons(linear=self.linear(weight, bias))

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`.

        The mean row of `wte` is multiplied in float32, as `BFloat16.head` explains; by a sum along
        each row, because a matrix-vector product's bits depend on the number of rows.
        """
        mean = wte.mean(dim=0)  # [C]
        product = _product(wte - mean)
        return lambda x: product(x).add_((x * mean).sum(dim=-1, keepdim=True))


def _product(weight: Tensor) -> Product:
    """`x @ weight.T` for weight [out, in]; x [N, in] and the result [N, out] are float32."""
    scale = _scale(weight, _largest_weight())  # [out, 1]
    sums = _scaled_sums((weight / scale).round_().to(torch.int8), scale.flatten())

    def product(x: Tensor) -> Tensor:
        row_scale = _scale(x, _LARGEST)  # [N, 1]
        moved = (x / row_scale).add_(_ZERO + 0.5)  # positive, so that the cast rounds down
        return sums(moved.to(torch.uint8)).mul_(row_scale)

    return product


def _scale(rows: Tensor, largest: int) -> Tensor:
    """What each row is divided by, so that no entry is beyond `largest`."""
    return rows.abs().amax(dim=-1, keepdim=True).clamp_min_(_SMALLEST_ROW).div_(largest)


def _scaled_sums(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """`(x - 128) @ weight.T * scale` for x [N, in] uint8 and weight [out, in] int8, as float32."""
    if not torch._C._has_mkldnn:
        columns = weight.t()
        return lambda x: torch._int_mm((x ^ _ZERO).view(torch.int8), columns).float().mul_(scale)
    packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)  # strides are not read
    linear = torch.ops.onednn.qlinear_pointwise.default
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    unscaled: tuple[object, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
    return lambda x: linear(x, 1.0, _ZERO, packed, scale, zeros, *unscaled)


@cache
def _largest_weight() -> int:
    """The largest weight whose sums are exact on this CPU.

    Without VNNI oneDNN adds two products at a time in 16 bits, where larger ones overflow.
    """
    rows, ones = torch.full((16, 64), 255, dtype=torch.uint8), torch.ones(64)
    largest = torch.full((64, 64), _LARGEST, dtype=torch.int8)
    exact = (_scaled_sums(largest, ones)(rows) == 64 * _LARGEST * _LARGEST).all()
    return _LARGEST if exact else _LARGEST_WITHOUT_VNNI

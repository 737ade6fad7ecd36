"""bfloat16 products with float32 sums inside each product. Torch; the model thread.

Weights are packed for oneDNN (AMX where there is any). The residual stream, layer norms, `ln_f`
rows, embedding and logits stay float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.precision.base import Neurons, Product

_PACKED_ROWS = 64  # the row count that the packed layout is tuned for; any count is right


class BFloat16:
    """Weights, products and what is between them in bfloat16."""

    dtype = torch.bfloat16
    packs = True

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        return _products(weight.t(), bias.to(self.dtype)).linear

    def neurons(self, weight: Tensor, bias: Tensor) -> Neurons:
        """See `Precision.neurons`."""
        return _products(weight.t(), bias.to(self.dtype))

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`.

        A trained GPT-2 puts all logits of a row near one large number, where bfloat16 is coarse.
        The mean row of `wte` carries that number: it is multiplied in float32 and only what
        differs between tokens goes through bfloat16.
        """
        mean = wte.mean(dim=0)  # [C]
        product = _products(wte - mean, None).linear
        return lambda x: product(x.to(self.dtype)).float().add_((x @ mean).unsqueeze(1))


def _products(weight: Tensor, bias: Tensor | None) -> Neurons:
    """Products with weight [out, in] in bfloat16, packed where oneDNN can.

    There GELU is applied before the sums are rounded, and on the way out: alone it would cost a
    tenth of a long prefill.
    """
    weight = weight.to(torch.bfloat16).contiguous()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Neurons(linear=lambda x: F.linear(x, weight, bias))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise
    return Neurons(
        linear=lambda x: linear(x, packed, bias, "none", [], ""),
        fused=lambda x: linear(x, packed, bias, "gelu", [], "tanh"),
    )

"""Matrix products at the precision a model runs in. Torch; the model thread.

float32     products, K/V and everything else in float32
bfloat16    weights, products and K/V in bfloat16, packed for oneDNN (AMX where there is any); the
            residual stream, layer norms, `ln_f` rows, embedding and logits stay float32

Legend: N tokens of a batch, C width, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor], Tensor]

_PACKED_ROWS = 64  # the row count that the packed layout is tuned for; any count is right


class Precision(Protocol):
    """How weights are stored and multiplied."""

    dtype: torch.dtype

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """`x @ weight + bias` for x [N, in] in `dtype`; weight [in, out] as in the checkpoint."""
        ...

    def linear_gelu(self, weight: Tensor, bias: Tensor) -> Product:
        """GELU of the same product, in its tanh form.

        0.5 y (1 + tanh(sqrt(2/pi) (y + 0.044715 y^3))), as in openai/gpt-2 `src/model.py`, `gelu`.
        """
        ...

    def head(self, wte: Tensor) -> Product:
        """`x @ wte.T` for x [N, C] float32, as float32 [N, V]."""
        ...


class Float32:
    """Plain float32. The head multiplies by `wte` itself: the output is tied, not copied."""

    dtype = torch.float32

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        return lambda x: torch.addmm(bias, x, weight)

    def linear_gelu(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear_gelu`."""
        return lambda x: _gelu(torch.addmm(bias, x, weight))

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`."""
        return lambda x: F.linear(x, wte)


class BFloat16:
    """bfloat16 products with float32 sums inside each product."""

    dtype = torch.bfloat16

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        return _packed(weight.t(), bias.to(self.dtype))

    def linear_gelu(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear_gelu`."""
        return _packed(weight.t(), bias.to(self.dtype), gelu=True)

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`.

        A trained GPT-2 puts all logits of a row near one large number, where bfloat16 is coarse.
        The mean row of `wte` carries that number: it is multiplied in float32 and only what
        differs between tokens goes through bfloat16.
        """
        mean = wte.mean(dim=0)  # [C]
        product = _packed(wte - mean, None)
        return lambda x: product(x.to(self.dtype)).float().add_((x @ mean).unsqueeze(1))


def _gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]  # untyped op


def _packed(weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Product:
    """A product with weight [out, in] in bfloat16, packed where oneDNN can.

    There GELU is applied before the sums are rounded, and on the way out: alone it would cost a
    tenth of a long prefill.
    """
    weight = weight.to(torch.bfloat16).contiguous()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        if gelu:
            return lambda x: _gelu(F.linear(x, weight, bias))
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise
    after: tuple[object, ...] = ("gelu", [], "tanh") if gelu else ("none", [], "")
    return lambda x: linear(x, packed, bias, *after)


PRECISIONS: dict[str, Callable[[], Precision]] = {"float32": Float32, "bfloat16": BFloat16}

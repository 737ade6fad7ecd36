"""Plain float32. The head multiplies by `wte` itself: the output is tied, not copied.

Torch; the model thread.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.precision.base import Product, gelu


class Float32:
    """Products, K/V and everything else in float32."""

    dtype = torch.float32

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        return lambda x: torch.addmm(bias, x, weight)

    def linear_gelu(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear_gelu`."""
        return lambda x: gelu(torch.addmm(bias, x, weight))

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`."""
        return lambda x: F.linear(x, wte)

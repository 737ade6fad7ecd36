"""Plain float32. The head multiplies by `wte` itself: the output is tied, not copied.

Torch; the model thread.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.precision.base import Neurons, Product
from model.precision.calibration import fastest


class Float32:
    """Products, K/V and everything else in float32."""

    dtype = torch.float32
    packs = False

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """See `Precision.linear`."""
        return lambda x: torch.addmm(bias, x, weight)

    def neurons(self, weight: Tensor, bias: Tensor) -> Neurons:
        """See `Precision.neurons`."""
        return Neurons(linear=self.linear(weight, bias))

    def head(self, wte: Tensor) -> Product:
        """See `Precision.head`.

        For 4 to 64 rows oneDNN takes 0.6 to 0.9 of MKL's time where it was measured, for 1 or 2
        more; both read `wte` as it is.
        """
        if not torch._C._has_mkldnn:
            return _mkl(wte)
        return fastest((_mkl, _onednn), wte)


def _mkl(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def _onednn(weight: Tensor) -> Product:
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, weight, None, "none", [], "")

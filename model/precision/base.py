"""What a precision offers to the model. Torch; the model thread.

Legend: N tokens of a batch, C width, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


class Precision(Protocol):
    """How weights are stored and multiplied."""

    dtype: torch.dtype  # of what goes into a product and comes out of it

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


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, in place; see `Precision.linear_gelu`."""
    return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]  # untyped op

"""What a precision offers to the model. Torch; the model thread.

Legend: N tokens of a batch, C width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neurons:
    """`GELU(x @ weight + bias)`, in its tanh form.

    0.5 y (1 + tanh(sqrt(2/pi) (y + 0.044715 y^3))), as in openai/gpt-2 `src/model.py`, `gelu`.
    """

    linear: Product  # y alone
    fused: Product | None = None  # both at once, where that is how it is done

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.fused(x) if self.fused else gelu(self.linear(x))


class Precision(Protocol):
    """How weights are stored and multiplied."""

    dtype: torch.dtype  # of what goes into a product and comes out of it
    packs: bool  # whether it has copies of the weights in a form of its own

    def linear(self, weight: Tensor, bias: Tensor) -> Product:
        """`x @ weight + bias` for x [N, in] in `dtype`; weight [in, out] as in the checkpoint."""
        ...

    def neurons(self, weight: Tensor, bias: Tensor) -> Neurons:
        """GELU of the same product."""
        ...

    def head(self, wte: Tensor) -> Product:
        """`x @ wte.T` for x [N, C] float32, as float32 [N, V]."""
        ...


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, in place; see `Neurons`."""
    return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]  # untyped op

"""The precisions by name. Torch; the model thread.

float32     products, K/V and everything else in float32
bfloat16    weights, products and K/V in bfloat16; residual stream, norms and logits in float32
"""

from collections.abc import Callable

from model.precision.base import Precision
from model.precision.bfloat16 import BFloat16
from model.precision.float32 import Float32

PRECISIONS: dict[str, Callable[[], Precision]] = {"float32": Float32, "bfloat16": BFloat16}

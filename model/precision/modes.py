"""The precisions by name. Torch; the model thread.

float32     products and everything else in float32
bfloat16    weights and products in bfloat16; residual stream, norms and logits in float32
int8        weights and what enters a product in int8; everything else in float32

K/V has a type of its own, float32 or bfloat16 in any of them.
"""

from collections.abc import Callable

from model.precision.base import Precision
from model.precision.bfloat16 import BFloat16
from model.precision.float32 import Float32
from model.precision.int8 import Int8

PRECISIONS: dict[str, Callable[[], Precision]] = {
    "float32": Float32,
    "bfloat16": BFloat16,
    "int8": Int8,
}

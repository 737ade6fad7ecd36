"""Numbers that clients send, as the values of edits. Numpy, any thread.

Nested lists of JSON or base64 of little-endian float32, as answers write tensors; raw bytes of a
safetensors file. All become finite float32: what is written more precisely is rounded.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import pybase64

from server.errors import InvalidRequest
from sessions.edits import Value

_NUMBERS = frozenset({int, float})  # not bool


def value_of(array: npt.NDArray[np.floating]) -> Value:
    """An array of any floating type as a value.

    Raises:
        InvalidRequest: a number in it is not finite in float32.
    """
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, dtype="<f4")
    if not np.isfinite(floats).all():
        raise InvalidRequest("a number is not finite in float32")
    return Value(floats.shape, floats.tobytes())


def parse_data(data: str | Sequence[object], shape: tuple[int, ...]) -> Value:
    """`data` of a tensor of this shape.

    Raises:
        InvalidRequest: it has another shape, or what is no finite number.
    """
    flat = _decoded(data) if isinstance(data, str) else _flattened(data, shape)
    n_numbers = int(np.prod(shape))
    if flat.size != n_numbers:
        raise InvalidRequest(f"it has {flat.size} numbers; shape {list(shape)} has {n_numbers}")
    return value_of(flat.reshape(shape))


def _decoded(text: str) -> npt.NDArray[np.float32]:
    try:
        raw = pybase64.b64decode(text, validate=True)
        return np.frombuffer(raw, dtype="<f4")
    except ValueError:
        raise InvalidRequest("it is no base64 of little-endian float32") from None


def _flattened(data: Sequence[object], shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Level by level: each list is as long as the shape says, and numbers are all at the bottom."""
    level: Sequence[object] = [data]
    for axis, size in enumerate(shape):
        lists = [item for item in level if type(item) is list and len(item) == size]
        if len(lists) < len(level):
            raise InvalidRequest(f"its shape is not {list(shape)}: see axis {axis}")
        level = list(chain.from_iterable(lists))
    if not _NUMBERS.issuperset(map(type, level)):
        raise InvalidRequest(f"it has what is no number at the depth of shape {list(shape)}")
    try:
        return np.array(level, dtype=np.float64)
    except OverflowError:
        raise InvalidRequest("a number is not finite in float32") from None

"""Vectors that clients keep here for their interventions. The event loop; files on a worker.

They are named by what they hold, so that sending one again changes nothing, and bounded in bytes.
They are lost with the process; edits that used one have its numbers in the session's history.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from server.errors import InvalidRequest, VectorNotFound, VectorsFull
from server.interventions.numbers import value_of
from sessions.edits import Value

PAGE = 4096
"""Bytes that a vector counts for at least."""

MAX_TENSORS = 1024
"""Of one file."""

_MAX_NAME = 256
_MAX_AXES = 8
_LENGTH_BYTES = 8  # of the header's length, which begins a file
_MAX_HEADER_BYTES = 2**20  # the parser is one call, which keeps every other thread waiting
_deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
_DTYPES: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor under the name that it was last sent with."""

    name: str
    value: Value

    @property
    def id(self) -> str:
        """Equal for equal numbers in an equal shape."""
        digest = hashlib.sha256(str(self.value.shape).encode() + self.value.data)
        return f"vec_{digest.hexdigest()[:32]}"

    @property
    def n_bytes(self) -> int:
        """What it counts for."""
        return max(PAGE, len(self.value.data))


class Vectors:
    """What is kept, by owner and id: at most `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._kept: dict[tuple[str, str], Vector] = {}

    def put(self, vectors: Mapping[str, Vector], owner: str = "") -> None:
        """Keep vectors, by their ids: all of them or none.

        Raises:
            VectorsFull: there is no room for those that are new.
        """
        new = [vector for id_, vector in vectors.items() if (owner, id_) not in self._kept]
        n_bytes = self.held_bytes + sum(vector.n_bytes for vector in new)
        if n_bytes > self.max_bytes:
            raise VectorsFull(n_bytes=n_bytes, max_bytes=self.max_bytes)
        self.held_bytes = n_bytes
        self._kept |= {(owner, id_): vector for id_, vector in vectors.items()}

    def get(self, vector_id: str, owner: str = "") -> Vector:
        """The vector of this id.

        Raises:
            VectorNotFound: none is kept for this owner.
        """
        try:
            return self._kept[owner, vector_id]
        except KeyError:
            raise VectorNotFound(vector_id) from None

    def delete(self, vector_id: str, owner: str = "") -> None:
        """Forget a vector.

        Raises:
            VectorNotFound: none is kept for this owner.
        """
        self.held_bytes -= self.get(vector_id, owner).n_bytes
        del self._kept[owner, vector_id]

    def all(self, owner: str = "") -> dict[str, Vector]:
        """Every vector of an owner by its id, those first that came first."""
        return {id_: vector for (whose, id_), vector in self._kept.items() if whose == owner}


def parse_file(data: bytes) -> dict[str, Vector]:
    """The vectors in the bytes of a safetensors file, by id.

    Raises:
        InvalidRequest: it is no such file, or what it holds are no vectors.
    """
    header_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise InvalidRequest(f"its header would be over {_MAX_HEADER_BYTES} bytes")
    try:
        tensors = _deserialize(data)
    except safetensors.SafetensorError as error:
        raise InvalidRequest(f"it is no safetensors file: {str(error)[:200]}") from None
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise InvalidRequest(f"it holds {len(tensors)} tensors, not 1 to {MAX_TENSORS}")
    vectors = [_vector(name, **told) for name, told in sorted(tensors)]
    return {vector.id: vector for vector in vectors}


def _vector(name: str, *, dtype: str, shape: Sequence[int], data: bytearray) -> Vector:
    told = repr(name[:_MAX_NAME])
    if len(name) > _MAX_NAME:
        raise InvalidRequest(f"the name of tensor {told} is over {_MAX_NAME} characters")
    if dtype not in _DTYPES:
        raise InvalidRequest(f"tensor {told} is {dtype}, none of {', '.join(_DTYPES)}")
    if not (data and 0 < len(shape) <= _MAX_AXES):
        raise InvalidRequest(f"tensor {told} has no numbers, or not 1 to {_MAX_AXES} axes")
    try:
        return Vector(name, value_of(_array(dtype, data).reshape(shape)))
    except InvalidRequest as error:
        raise InvalidRequest(f"tensor {told}: {error}") from None


def _array(dtype: str, data: bytearray) -> npt.NDArray[np.floating]:
    numbers = np.frombuffer(data, dtype=_DTYPES[dtype])
    if dtype != "BF16":
        return numbers
    return (numbers.astype("<u4") << 16).view("<f4")  # the upper half of a float32

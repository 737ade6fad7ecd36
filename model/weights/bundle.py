"""TensorFlow's V2 checkpoint bundle, read without TensorFlow.

`<prefix>.index` is a LevelDB table from tensor name to a `BundleEntryProto`; the bytes lie in
`<prefix>.data-<shard>-of-<shards>`. Formats: leveldb `doc/table_format.md`; tensorflow
`core/protobuf/tensor_bundle.proto` and `core/util/tensor_bundle/`. Every checksum is verified.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.errors import CorruptWeights, UnsupportedDtype
from model.weights.crc32c import crc32c, masked

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5  # of a block: kind of compression, masked CRC-32C
_FLOAT = 1  # tensorflow's DT_FLOAT
_FLOAT_BYTES = 4

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf wire types

_Fields = dict[int, list[int | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lies. Offset and size in bytes."""

    shape: tuple[int, ...]
    dtype: int
    shard: int
    offset: int
    size: int
    crc: int


class Bundle:
    """The tensors behind one prefix, all of them float32.

    Raises:
        CorruptWeights: the index is cut, fails its checksums, or uses what OpenAI's never do.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self.index_path = prefix.with_name(prefix.name + ".index")
        try:
            rows = dict(_table(self.index_path.read_bytes()))
            self._n_shards = _header(rows.pop(b""))
            self.entries = {name.decode(): _entry(value) for name, value in rows.items()}
        except (OSError, LookupError, ValueError, TypeError, struct.error) as error:
            raise CorruptWeights(
                str(self.index_path), reason=f"is no whole bundle index: {error}"
            ) from error

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, its checksum verified.

        Raises:
            UnsupportedDtype: it is not float32.
            CorruptWeights: its bytes are missing or not the ones that were written.
        """
        entry = self.entries[name]
        if entry.dtype != _FLOAT:
            raise UnsupportedDtype(name, f"number {entry.dtype} of TensorFlow's")
        path = self._shard_path(entry.shard)
        if not path.is_file():
            raise CorruptWeights(str(path), reason=f"is missing, and {name} is in it")
        n_bytes = math.prod(entry.shape) * _FLOAT_BYTES
        raw = np.fromfile(path, dtype=np.uint8, count=n_bytes, offset=entry.offset)
        if not len(raw) == n_bytes == entry.size:
            raise CorruptWeights(str(path), reason=f"{name} does not have its bytes")
        if masked(crc32c(raw)) != entry.crc:
            raise CorruptWeights(str(path), reason=f"the checksum of {name} is wrong")
        return raw.view("<f4").reshape(entry.shape)

    def _shard_path(self, shard: int) -> Path:
        return self._prefix.with_name(
            f"{self._prefix.name}.data-{shard:05d}-of-{self._n_shards:05d}"
        )


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every key and value of a LevelDB table."""
    footer = data[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("the footer is missing")
    _, _, at = _handle(footer, 0)  # of the meta index, which is empty
    offset, size, _ = _handle(footer, at)
    for _, handle in _block(data, offset, size):
        offset, size, _ = _handle(handle, 0)
        yield from _block(data, offset, size)


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one block. A key shares its first bytes with the one before."""
    block = _checked(data, offset, size)
    (n_restarts,) = struct.unpack("<I", block[-4:])
    end = len(block) - 4 * (n_restarts + 1)
    at, key = 0, b""
    while at < end:
        n_shared, at = _varint(block, at)
        n_own, at = _varint(block, at)
        n_value, at = _varint(block, at)
        key = key[:n_shared] + block[at : at + n_own]
        at += n_own
        yield key, block[at : at + n_value]
        at += n_value


def _checked(data: bytes, offset: int, size: int) -> bytes:
    kind, crc = struct.unpack("<BI", data[offset + size : offset + size + _TRAILER_BYTES])
    if kind != 0:
        raise ValueError("a block is compressed")
    if masked(crc32c(np.frombuffer(data, np.uint8, size + 1, offset))) != crc:
        raise ValueError("the checksum of a block is wrong")
    return data[offset : offset + size]


def _header(value: bytes) -> int:
    """The number of shards in a `BundleHeaderProto`."""
    fields = _fields(value)
    if _int(fields, 2) != 0:
        raise ValueError("the tensors are big-endian")
    return _int(fields, 1)


def _entry(value: bytes) -> Entry:
    fields = _fields(value)
    if 7 in fields:
        raise ValueError("a tensor is stored in slices")
    return Entry(
        shape=_shape(fields),
        dtype=_int(fields, 1),
        shard=_int(fields, 3),
        offset=_int(fields, 4),
        size=_int(fields, 5),
        crc=_int(fields, 6),
    )


def _shape(fields: _Fields) -> tuple[int, ...]:
    """Field 2 is a `TensorShapeProto`, whose field 2 repeats, and whose field 1 is a size."""
    (shape,) = fields.get(2, [b""])
    return tuple(_int(_fields(_as_bytes(dim)), 1) for dim in _fields(_as_bytes(shape)).get(2, []))


def _fields(message: bytes) -> _Fields:
    """A protobuf message by field number."""
    fields: _Fields = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _value(message, at, tag & 7)
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _value(message: bytes, at: int, wire_type: int) -> tuple[int | bytes, int]:
    if wire_type == _VARINT:
        return _varint(message, at)
    if wire_type == _BYTES:
        size, at = _varint(message, at)
        return message[at : at + size], at + size
    size = {_FIXED32: 4, _FIXED64: 8}[wire_type]
    return int.from_bytes(message[at : at + size], "little"), at + size


def _int(fields: _Fields, number: int) -> int:
    """A whole number; protobuf leaves zeros out."""
    value = fields.get(number, [0])[-1]
    if isinstance(value, int):
        return value
    raise TypeError(f"field {number} is no number")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise TypeError("a message was expected")


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Offset and size of a block, and where the next bytes begin."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return offset, size, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at

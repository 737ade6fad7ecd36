"""model.weights.crc32c against RFC 3720's vectors and a slow twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.weights.crc32c import crc32c, masked


def slow(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def of(data: bytes) -> int:
    return crc32c(np.frombuffer(data, dtype=np.uint8))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_vectors(data: bytes, expected: int) -> None:
    assert of(data) == expected


@given(st.binary(max_size=700))
@settings(deadline=None, max_examples=50)
def test_any_short_bytes(data: bytes) -> None:
    assert of(data) == slow(data)


@pytest.mark.parametrize(
    "size", [63, 64, 65, 65_536, 65_537, (1 << 20) - 1, (1 << 20) + 1, 2_500_001]
)
def test_long_data_is_joined_from_its_parts(size: int) -> None:
    """A sum is linear: with one bit set, it must be what the zeros after that bit make of it."""
    data = np.zeros(size, dtype=np.uint8)
    zeros = crc32c(data)
    changes = set()
    for at in (0, size // 3, size - 1):
        data[at] = 1
        changes.add(crc32c(data) ^ zeros)
        data[at] = 0

    assert len(changes) == 3
    assert crc32c(data[:-1]) != zeros


def test_long_random_data_equals_the_slow_twin() -> None:
    data = np.random.default_rng(1).integers(0, 256, 150_001).astype(np.uint8).tobytes()

    assert of(data) == slow(data)


def test_blocks_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(2).integers(0, 256, 5_001).astype(np.uint8).tobytes()
    monkeypatch.setattr("model.weights.crc32c._BLOCK", 1_000)

    assert of(data) == slow(data)


def test_masking_as_leveldb_does() -> None:
    assert masked(0) == 0xA282EAD8
    assert masked(0xE3069283) == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF

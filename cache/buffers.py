"""The memory behind keys, values and `ln_f` rows. Torch; the model thread.

One address range holds every slot, contiguous per head and never moved, grown or concatenated:

    keys, values   [layer, slot, head, position, D]     in the precision of the cache
    ln_f           [slot, position, C]                  float32

A layer's keys of all slots lie together, so neighbouring slots can be read in one call.

The range is mapped but not backed: the operating system gives a page when a row is first written,
and takes it back when `drop` says so. So resident memory follows the pieces that are in use, while
a session that shares nothing is contiguous and grows in place. (A gather of small blocks would
copy every key at every step; a run that is moved as it grows would copy it now and then.)

Everything that no session has written is zero, and what a failed step left is made zero again.
Attention may read past the end of a short neighbour and mask it out, which is only sound while
what lies there is finite.

Legend: S slots, L layers, H heads, D head width, C = H * D, N tokens of a batch.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cache.errors import NoAddressSpace

# Not exported by CPython before 3.13; the value is Linux's. Elsewhere mappings are lazy anyway.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_NOHUGEPAGE") else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that fix a buffer's layout."""

    n_ctx: int
    n_layer: int
    n_head: int
    d_head: int
    dtype: torch.dtype = torch.float32

    @property
    def n_embd(self) -> int:
        """C, the width of one `ln_f` row."""
        return self.n_head * self.d_head

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position's keys and values over all layers."""
        return 2 * self.n_layer * self.n_embd * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in all: keys, values and float32 `ln_f` row."""
        return self.kv_bytes_per_token + self.n_embd * torch.float32.itemsize


class KVBuffers:
    """Keys, values and `ln_f` rows of `n_slots` slots."""

    def __init__(self, shape: Shape, n_slots: int) -> None:
        """Map the address range; if the machine refuses it, map half as many slots.

        Raises:
            NoAddressSpace: not even one slot can be mapped.
        """
        self.shape = shape
        slot_bytes = shape.n_ctx * shape.row_bytes
        self._map, self.n_slots = _map_slots(slot_bytes, n_slots)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._kv_bytes = self.n_slots * shape.n_ctx * shape.kv_bytes_per_token
        whole = torch.from_numpy(self._bytes)
        kv = whole[: self._kv_bytes].view(shape.dtype)
        kv = kv.view(shape.n_layer, 2, self.n_slots, shape.n_head, shape.n_ctx, shape.d_head)
        self._kv = kv
        self._rows = _as_numpy(kv.view(-1, shape.d_head))  # one row: a position of a head
        self.keys = kv[:, 0]  # [L, S, H, n_ctx, D]
        self.values = kv[:, 1]  # [L, S, H, n_ctx, D]
        ln_f = whole[self._kv_bytes :].view(torch.float32)
        self.ln_f = ln_f.view(self.n_slots, shape.n_ctx, shape.n_embd)

    def rows_of(self, slots: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Where layer 0 keeps the keys and values of N tokens, for `store`: [N, 2, H]."""
        n_slots, n_head, n_ctx = self.n_slots, self.shape.n_head, self.shape.n_ctx
        slot = np.asarray(slots, np.int64)[:, None, None] + np.array([[0], [n_slots]])  # [N, 2, 1]
        strip = slot * n_head + np.arange(n_head)  # a strip: one head's keys or values
        rows: npt.NDArray[np.int64] = strip * n_ctx + np.asarray(positions)[:, None, None]
        return rows

    def store(self, layer: int, rows: npt.NDArray[np.int64], kv: Tensor) -> None:
        """Write the keys and values kv [N, 2, H, D] of one layer in place.

        Numpy copies a row at a time; torch's index kernel goes element by element, three times
        as slow, and a copy per session costs its overhead as often as there are sessions.
        """
        shape = self.shape
        layer_rows = 2 * self.n_slots * shape.n_head * shape.n_ctx
        self._rows[rows + layer * layer_rows] = _as_numpy(kv)

    def copy(self, src: int, dst: int, positions: range) -> None:
        """Copy the rows at `positions` of slot `src` to the same positions of slot `dst`."""
        at = slice(positions.start, positions.stop)
        self._kv[:, :, dst, :, at] = self._kv[:, :, src, :, at]
        self.ln_f[dst, at] = self.ln_f[src, at]

    def drop(self, slot: int, positions: range) -> None:
        """Make `positions` of `slot` zero again and hand their whole pages back.

        The last piece of a slot may reach past `n_ctx`, where there is nothing.
        """
        shape = self.shape
        positions = positions[: max(0, shape.n_ctx - positions.start)]
        if not positions:
            return
        row = shape.d_head * shape.dtype.itemsize
        for part in range(2 * shape.n_layer):
            first = (part * self.n_slots + slot) * shape.n_head
            self._drop_rows(first, shape.n_head, row, positions)
        self._drop_rows(slot, 1, shape.n_embd * 4, positions, base=self._kv_bytes)

    def _drop_rows(
        self, first: int, n_strips: int, row: int, positions: range, *, base: int = 0
    ) -> None:
        strip = self.shape.n_ctx * row
        for i in range(first, first + n_strips):
            start = base + i * strip + positions.start * row
            self._forget(start, start + len(positions) * row)

    def _forget(self, start: int, stop: int) -> None:
        """Zero bytes start..stop-1: whole pages by giving them back, the ends by writing."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, stop // page * page
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        else:
            first = last = stop
        self._bytes[start:first] = 0
        self._bytes[last:stop] = 0


def _as_numpy(x: Tensor) -> npt.NDArray[np.generic]:
    """The same memory as numpy sees it, which has no bfloat16: two bytes stay two bytes."""
    view: npt.NDArray[np.generic] = (x.view(torch.int16) if x.dtype.itemsize == 2 else x).numpy()
    return view


def _map_slots(slot_bytes: int, n_slots: int) -> tuple[mmap.mmap, int]:
    while n_slots >= 1:
        try:
            mapped = mmap.mmap(
                -1,
                n_slots * slot_bytes,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE,
            )
        except (OSError, OverflowError):
            n_slots //= 2
            continue
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would back rows that nobody holds
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        return mapped, n_slots
    raise NoAddressSpace(f"cannot map {slot_bytes} bytes of address space for one session")

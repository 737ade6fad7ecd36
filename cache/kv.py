"""The K/V cache: the books (`cache.accounting`) and the memory (`cache.buffers`) kept together.

Owned by the model thread. `usage` may be read from any thread: it is a few integers.
"""

from cache.accounting import KV, PIECE, KVUsage, Ledger
from cache.buffers import KVBuffers, Shape


class KVCache:
    """Places for the K/V of sessions, within a budget of bytes."""

    def __init__(self, shape: Shape, *, budget_bytes: int, max_slots: int) -> None:
        """Map room for up to `max_slots` sessions; hold at most `budget_bytes` of pieces.

        A budget below one piece is raised to one piece.
        """
        self._piece_bytes = PIECE * shape.row_bytes
        total_pieces = max(1, budget_bytes // self._piece_bytes)
        self.buffers = KVBuffers(shape, min(max_slots, total_pieces))
        self.ledger = Ledger(n_slots=self.buffers.n_slots, total_pieces=total_pieces)

    @property
    def shape(self) -> Shape:
        """The layout of the buffers."""
        return self.buffers.shape

    def open(self) -> KV:
        """An empty place.

        Raises:
            CacheFull: no slot is free.
        """
        return self.ledger.open()

    def reserve(self, kv: KV, length: int) -> None:
        """Make sure that positions 0..length-1 may be written.

        Raises:
            CacheFull: the budget has no room; nothing was taken.
        """
        self.ledger.reserve(kv, length)

    def truncate(self, kv: KV, length: int) -> None:
        """Keep the first `length` rows; everything after them, reserved or written, goes."""
        self.buffers.drop(kv.slot, self.ledger.shrink(kv, length))

    def close(self, kv: KV) -> None:
        """Give the place back. `kv` must not be used again."""
        self.buffers.drop(kv.slot, self.ledger.close(kv))

    def bytes_for(self, length: int) -> int:
        """Bytes of the pieces that `length` positions need."""
        return self.ledger.pieces_for(length) * self._piece_bytes

    def usage(self) -> KVUsage:
        """The books in bytes. Nothing is shared yet: each piece has one holder."""
        return KVUsage(
            bytes_total=self.ledger.total_pieces * self._piece_bytes,
            bytes_used=self.ledger.used_pieces * self._piece_bytes,
            bytes_shared=0,
            bytes_per_token=self.shape.kv_bytes_per_token,
        )

    def check(self) -> None:
        """Prove the books."""
        self.ledger.check()

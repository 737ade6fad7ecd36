"""The K/V cache: the books (`cache.accounting`) and the memory (`cache.buffers`) kept together.

Owned by the model thread. `usage` may be read from any thread: it is a few integers.
"""

from collections.abc import Hashable, Iterable, Sequence

from cache.accounting import KV, PIECE, KVUsage, Ledger, Run
from cache.buffers import KVBuffers, Shape


class KVCache:
    """Places for the K/V of sessions, within a budget of bytes, and what is kept for reuse."""

    def __init__(
        self, shape: Shape, *, budget_bytes: int, max_slots: int, piece: int = PIECE
    ) -> None:
        """Map room for up to `max_slots` sessions; fill at most `budget_bytes` of pieces.

        `piece` is the number of positions that are shared, reserved and dropped as one. A budget
        below one piece is raised to one piece.
        """
        self._piece_bytes = piece * shape.row_bytes
        total_pieces = max(1, budget_bytes // self._piece_bytes)
        self.buffers = KVBuffers(shape, max_slots)
        self.ledger = Ledger(
            n_slots=self.buffers.n_slots,
            total_pieces=total_pieces,
            slot_pieces=-(-shape.n_ctx // piece),
            piece=piece,
        )

    @property
    def shape(self) -> Shape:
        """The layout of the buffers."""
        return self.buffers.shape

    @property
    def free_pieces(self) -> int:
        """Pieces that can be reserved, those included that are only kept for reuse."""
        return self.ledger.free_pieces

    @property
    def n_places(self) -> int:
        """Places that are open."""
        return self.ledger.n_places

    @property
    def free_places(self) -> int:
        """Places that can be opened."""
        return self.ledger.free_places

    @property
    def dropped_cached(self) -> int:
        """Pieces that were kept for reuse and given up, ever."""
        return self.ledger.pool.n_given_up

    def open(self) -> KV:
        """An empty place.

        Raises:
            CacheFull: no place is free.
        """
        return self.ledger.open()

    def reserve(self, kv: KV, length: int) -> None:
        """Make the positions from the rows present up to `length` - 1 writable.

        Copies the rows of the piece that the next one lies in, if others read it too.

        Raises:
            CacheFull: more than `free_pieces` are needed; nothing was changed.
        """
        dropped, copied = self.ledger.reserve(kv, length)
        self._drop(dropped)
        if copied:
            self.buffers.copy(copied.src, copied.dst, copied.positions)
            self._drop(copied.freed)

    def truncate(self, kv: KV, length: int) -> None:
        """Keep the first `length` rows and no room beyond their last piece. Copies nothing."""
        self._drop(self.ledger.truncate(kv, length))

    def close(self, kv: KV) -> None:
        """Give the place back. `kv` must not be used again."""
        self._drop(self.ledger.close(kv))

    def fork(self, kv: KV, length: int) -> KV:
        """A new place that shares the first `length` rows, or all if there are less.

        Raises:
            CacheFull: no place is free.
        """
        return self.ledger.fork(kv, length)

    def adopt(self, kv: KV, owner: str, step_keys: Sequence[Hashable], *, limit: int) -> None:
        """Make ready (`KV.ready`) what is known of the first `limit` of `step_keys`.

        No change if that is not more than is ready. Else the pieces found replace those that `kv`
        has from its last row on; `step_keys` begin with those that led to the rows it has.
        """
        self._drop(self.ledger.adopt(kv, owner, step_keys, limit=limit))

    def has_news(self, kv: KV) -> bool:
        """Whether `index` would offer a piece that it did not offer before."""
        return kv.length // kv.piece > kv.indexed

    def index(self, kv: KV, owner: str, step_keys: Sequence[Hashable]) -> None:
        """Offer the whole pieces of rows present to others of `owner` that begin the same."""
        self.ledger.index(kv, owner, step_keys)

    def pieces_needed(self, kv: KV, length: int) -> int:
        """Pieces that `reserve` would take from the free ones."""
        return self.ledger.pieces_needed(kv, length)

    def fits(self, kv: KV, length: int, *, beside: Iterable[KV]) -> bool:
        """Whether `reserve` would succeed if there were no places but `kv` and these."""
        return self.ledger.fits(kv, length, beside=beside)

    def bytes_for(self, length: int) -> int:
        """Bytes of the pieces that `length` positions need."""
        return self.ledger.pieces_for(length) * self._piece_bytes

    def usage(self) -> KVUsage:
        """The books in bytes."""
        pool = self.ledger.pool
        return KVUsage(
            bytes_total=pool.total * self._piece_bytes,
            bytes_used=pool.n_held * self._piece_bytes,
            bytes_shared=pool.n_shared * self._piece_bytes,
            bytes_cached=pool.n_cached * self._piece_bytes,
            bytes_per_token=self.shape.kv_bytes_per_token,
        )

    def check(self) -> None:
        """Prove the books."""
        self.ledger.check()

    def _drop(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.buffers.drop(run.slot, range(run.start, run.stop))

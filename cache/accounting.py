"""Who holds which pieces of which slots. Pure Python, no torch; the model thread.

A *slot* is an address range with room for all `n_ctx` positions of one session; row `p` of a slot
belongs to absolute position `p`, always. A *piece* is `PIECE` consecutive positions of a slot and
the unit of memory: a slot costs nothing until a piece of it is held.

    position   0       32      64      96      128
    slot 0     |#######|#######|###....|       |      length 83, holds 3 pieces
    slot 1     |##.....|       |       |       |      length 10, holds 1 piece
    slot 2     |       |       |       |       |      free
                 # row present   . reserved, still zero   (blank) no memory behind it

Who frees: `shrink` and `close` hand back the range of positions whose memory is to be dropped, and
their caller (`cache.kv.KVCache`) drops it. Nobody else does.

What this shape is for: pieces lie at absolute positions, so a fork can read its parent's slot up
to the branch and write its own slot after it, at the same positions. Sharing then needs a count
of holders per piece here and a second span per session, and moves no row.

The lowest free slot is taken first, so that sessions at work tend to be neighbours: attention
reads neighbouring slots in one call (`model.attention`).
"""

import heapq
from dataclasses import dataclass, field

from cache.errors import CacheFull

PIECE = 32  # positions; 8 KiB of one head's keys in float32 at D = 64: whole pages of 4 KiB


@dataclass(slots=True, eq=False)
class KV:
    """One session's place in the cache.

    `length` rows are present: the K/V of the session's first `length` tokens, nothing else.
    Rows from there to `written` may hold what a failed or taken-back step left.
    """

    slot: int
    piece: int = PIECE
    length: int = 0
    written: int = 0
    n_pieces: int = 0

    @property
    def reserved(self) -> int:
        """Positions that may be written."""
        return self.n_pieces * self.piece

    def stage(self, n_new: int) -> None:
        """Say that rows of `n_new` more positions are about to be written."""
        assert self.length + n_new <= self.reserved, "stepped without room"
        self.written = max(self.written, self.length + n_new)

    def advance(self, n_new: int) -> None:
        """Say that `n_new` staged rows are whole in every layer."""
        assert self.length + n_new <= self.written, "advanced past what was staged"
        self.length += n_new


@dataclass(slots=True)
class Ledger:
    """The pieces of all slots, within a budget of `total_pieces`."""

    n_slots: int
    total_pieces: int
    piece: int = PIECE
    _free_slots: list[int] = field(init=False)
    _held: dict[int, KV] = field(init=False, default_factory=dict)
    used_pieces: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._free_slots = list(range(self.n_slots))

    @property
    def free_pieces(self) -> int:
        """Pieces that can still be reserved."""
        return self.total_pieces - self.used_pieces

    @property
    def free_slots(self) -> int:
        """Slots that can still be opened."""
        return len(self._free_slots)

    def pieces_for(self, length: int) -> int:
        """Pieces that `length` positions from 0 need."""
        return -(-length // self.piece)

    def open(self) -> KV:
        """Take the lowest free slot; it holds no piece yet.

        Raises:
            CacheFull: all slots are taken.
        """
        if not self._free_slots:
            raise self._full(0)
        kv = KV(slot=heapq.heappop(self._free_slots), piece=self.piece)
        self._held[kv.slot] = kv
        return kv

    def reserve(self, kv: KV, length: int) -> None:
        """Hold the pieces of positions 0..length-1. Fewer than are held already is no change.

        Raises:
            CacheFull: not enough free pieces; nothing was taken.
        """
        needed = self.pieces_for(length) - kv.n_pieces
        if needed > self.free_pieces:
            raise self._full(needed)
        if needed > 0:
            kv.n_pieces += needed
            self.used_pieces += needed

    def shrink(self, kv: KV, length: int) -> range:
        """Forget rows from `length` on and give back the pieces that held only those.

        What a failed step left after the last row present goes in any case. Returns the positions
        whose contents must be dropped: all that may have been written.
        """
        length = min(length, kv.length)
        dropped = range(length, kv.written)
        kept = self.pieces_for(length)
        self.used_pieces -= kv.n_pieces - kept
        kv.n_pieces = kept
        kv.length = kv.written = length
        return dropped

    def close(self, kv: KV) -> range:
        """Give back the slot and all its pieces; returns the positions to drop."""
        dropped = self.shrink(kv, 0)
        del self._held[kv.slot]
        heapq.heappush(self._free_slots, kv.slot)
        return dropped

    def check(self) -> None:
        """Prove the books: every slot is free or held once, every piece is counted once."""
        assert sorted([*self._free_slots, *self._held]) == list(range(self.n_slots))
        assert self.used_pieces == sum(kv.n_pieces for kv in self._held.values())
        assert 0 <= self.used_pieces <= self.total_pieces
        for slot, kv in self._held.items():
            assert kv.slot == slot
            assert 0 <= kv.length <= kv.written <= kv.reserved

    def _full(self, needed: int) -> CacheFull:
        return CacheFull(
            needed_pieces=needed, free_pieces=self.free_pieces, free_slots=self.free_slots
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """Bytes of the cache, as `/v1/capabilities` and the metrics show them."""

    bytes_total: int
    bytes_used: int
    bytes_shared: int
    bytes_per_token: int

"""Who holds which pieces of which slots. Pure Python, no torch; the model thread.

A *slot* is an address range with room for all `n_ctx` positions; its row `p` belongs to absolute
position `p`, always. A *piece*, `PIECE` consecutive positions of a slot, is the unit of memory. A
session's *place* is a table: which slot has its piece 0, its piece 1, ... Pieces that follow each
other in one slot are contiguous memory, a *run*. A session that shares nothing is one run.

    position   0       32      64      96      128
    slot 0     |#######|#######|#######|####...|    A wrote 110 rows. slots 0 0 0 0, one run
    slot 1     |       |       |=##....|       |    B forked from A at 70: slots 0 0 1, two runs
    slot 2     |ccccccc|ccccccc|       |       |    no session's any more, but indexed
                 # written   = copied   . reserved   c cached   (blank) no memory behind it

Sharing is counting: `fork`, `truncate` and `adopt` change tables and counts of holders. Rows are
copied only when a place writes inside a piece that is not its own, and then those of that piece:
B's rows 64..69, at most 31. The *owner* of a piece is who wrote it first, until it takes rows back
that others may read; it goes on writing behind the rows that the others see. Whoever is left alone
with a piece may own it again, at the price of its entry in the index.

The index (`cache.prefixes`) knows which beginnings whole pieces hold; those that no session holds
any more are kept until their room is needed (`cache.pool`). Changes here are of the books: they
return the runs whose memory must be dropped, and what to copy after that, to `cache.kv.KVCache`.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from cache.errors import CacheFull
from cache.pool import Pool
from cache.prefixes import Piece, PrefixIndex

PIECE = 32  # positions; 8 KiB of one head's keys in float32 at D = 64: whole pages of 4 KiB


@dataclass(frozen=True, slots=True)
class Run:
    """Positions `start`..`stop`-1 of one slot: contiguous memory."""

    slot: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Copy:
    """The rows at `positions` of slot `src` are wanted in slot `dst` too.

    `freed`: what nobody needs any more then.
    """

    src: int
    dst: int
    positions: range
    freed: Sequence[Run] = ()


@dataclass(slots=True, eq=False)
class KV:
    """One session's place in the cache.

    `length` rows are present: the K/V of the session's first `length` tokens, nothing else. Those
    up to `ready` are there as well, found in the index: advancing over them computes nothing.
    """

    piece: int = PIECE
    length: int = 0
    ready: int = 0
    written: int = 0  # rows before this one may hold what a failed step left
    slots: list[int] = field(default_factory=list)
    owned: int = 0  # pieces from this one on are this place's own to write
    indexed: int = 0  # pieces before this one were offered to the index
    runs: tuple[Run, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.lay(self.slots)

    def lay(self, slots: list[int]) -> None:
        """Change the table: `slots[i]` has piece i."""
        self.slots = slots
        self.runs = tuple(runs_of(self.pieces, self.piece))

    @property
    def pieces(self) -> list[Piece]:
        """All pieces held, in order."""
        return [(slot, i) for i, slot in enumerate(self.slots)]

    @property
    def reserved(self) -> int:
        """Positions that there is memory for."""
        return len(self.slots) * self.piece

    @property
    def owns_next(self) -> bool:
        """Whether the next row to be written falls in no piece of others."""
        return self.owned * self.piece <= self.ready

    @property
    def left_over(self) -> list[Run]:
        """What a failed step left behind the rows present; all of it in pieces of its own."""
        ends = [(r.slot, max(r.start, self.ready), min(r.stop, self.written)) for r in self.runs]
        return [Run(slot, start, stop) for slot, start, stop in ends if start < stop]

    def slot_of(self, position: int) -> int:
        """The slot that has the row of `position`."""
        return self.slots[position // self.piece]

    def stage(self, n_new: int) -> None:
        """Say that rows of `n_new` more positions are about to be written."""
        assert self.length + n_new <= self.reserved, "stepped without room"
        assert self.length == self.ready, "stepped what is ready"
        assert self.owns_next, "stepped in a shared piece"
        self.written = max(self.written, self.length + n_new)

    def advance(self, n_new: int) -> None:
        """Say that `n_new` rows more are present: staged and whole in every layer, or ready."""
        end = self.ready if self.ready > self.length else self.written
        assert self.length + n_new <= end, "advanced past what was staged"
        self.length += n_new
        self.ready = max(self.ready, self.length)


@dataclass(slots=True)
class Ledger:
    """All places, within `n_slots` slots and a budget of `total_pieces`."""

    n_slots: int
    total_pieces: int
    slot_pieces: int  # pieces that one slot has
    piece: int = PIECE
    pool: Pool = field(init=False)
    _places: set[KV] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.pool = Pool(self.n_slots, self.total_pieces, PrefixIndex(self.piece))

    @property
    def free_pieces(self) -> int:
        """Pieces that can be reserved, those included that are only kept for reuse."""
        return self.pool.n_free

    @property
    def n_places(self) -> int:
        """Places that are open."""
        return len(self._places)

    @property
    def free_places(self) -> int:
        """Places that can be opened."""
        return self.n_slots - len(self._places)

    def pieces_for(self, length: int) -> int:
        """Pieces that `length` positions from 0 need."""
        return -(-length // self.piece)

    def pieces_needed(self, kv: KV, length: int) -> int:
        """Pieces that `reserve` would take from the free ones."""
        if length <= kv.ready:
            return 0
        more = max(0, self.pieces_for(length) - len(kv.slots))
        return more + self._must_copy(kv, more)

    def fits(self, kv: KV, length: int, *, beside: Iterable[KV]) -> bool:
        """Whether `reserve` would succeed if there were no places but `kv` and these."""
        others = {piece for other in beside for piece in other.pieces}
        held = others | set(kv.pieces)
        more = max(0, self.pieces_for(length) - len(kv.slots))
        copied = length > kv.ready and not kv.owns_next and kv.pieces[-1] in others
        return len(held) + more + copied <= self.total_pieces

    def open(self) -> KV:
        """An empty place. It takes no piece yet.

        Raises:
            CacheFull: there are as many places as slots.
        """
        if not self.free_places:
            raise self._full(0)
        kv = KV(self.piece)
        self._places.add(kv)
        return kv

    def reserve(self, kv: KV, length: int) -> tuple[list[Run], Copy | None]:
        """Make positions up to `length` - 1 writable. Returns what to drop, and then to copy.

        Raises:
            CacheFull: more than `free_pieces` are needed; nothing was changed.
        """
        needed = self.pieces_needed(kv, length)
        if needed > self.free_pieces:
            raise self._full(needed)
        if not needed and (kv.owns_next or length <= kv.ready):
            return [], None
        if kv.owns_next:
            return self._extend(kv, length), None
        if self._must_copy(kv, max(0, self.pieces_for(length) - len(kv.slots))):
            return self._extend_copied(kv, length)
        kv.owned = len(kv.slots) - 1
        return runs_of(self.pool.forget(kv.pieces[-1]), self.piece) + self._extend(kv, length), None

    def truncate(self, kv: KV, length: int) -> list[Run]:
        """Forget rows from `length` on, and the pieces of only those. Returns what to drop."""
        length = min(length, kv.length)
        kept = self.pieces_for(length)
        if length < kv.length and any(map(self.pool.is_fixed, kv.pieces[kept - 1 : kept])):
            kv.owned = kept
        dropped = self._give_up(kv, kept)
        kv.lay(kv.slots[:kept])
        kv.length = kv.ready = kv.written = length
        kv.owned, kv.indexed = min(kv.owned, kept), min(kv.indexed, length // self.piece)
        return dropped

    def close(self, kv: KV) -> list[Run]:
        """Give up the place and all its pieces. Returns what to drop."""
        dropped = self.truncate(kv, 0)
        self._places.remove(kv)
        return dropped

    def fork(self, kv: KV, length: int) -> KV:
        """A new place with the first `length` rows of `kv`, or all if it has less.

        Raises:
            CacheFull: there are as many places as slots.
        """
        child = self.open()
        child.length = child.ready = child.written = min(length, kv.length)
        child.owned = self.pieces_for(child.length)
        child.lay(kv.slots[: child.owned])
        self.pool.hold(child.pieces)
        return child

    def adopt(self, kv: KV, owner: str, step_keys: Sequence[Hashable], *, limit: int) -> list[Run]:
        """Make ready what the index knows of `step_keys[:limit]`. Returns what to drop."""
        chain = self.pool.index.chain(owner, step_keys[:limit])
        if len(chain) * self.piece <= kv.ready:
            return []
        first = kv.length // self.piece
        self.pool.hold(chain[first:])
        dropped = self._give_up(kv, first)
        kv.lay([*kv.slots[:first], *(slot for slot, _ in chain[first:])])
        kv.owned = kv.indexed = len(chain)
        kv.ready = kv.written = kv.reserved
        return dropped

    def index(self, kv: KV, owner: str, step_keys: Sequence[Hashable]) -> None:
        """Offer the whole pieces of rows present, which `step_keys` and maybe more led to."""
        n_whole = min(kv.length, len(step_keys)) // self.piece
        if n_whole > kv.indexed:
            self.pool.index.add(owner, step_keys, kv.pieces[:n_whole])
            kv.indexed = n_whole

    def check(self) -> None:
        """Prove the books: the counts, each place, and that nobody writes what others read."""
        assert 0 <= self.free_places <= self.n_slots
        self.pool.check([kv.pieces for kv in self._places])
        for kv in self._places:
            self._check_place(kv)
            for slot, i in kv.pieces[max(kv.owned, kv.length // self.piece) :]:
                assert (slot, i) not in self.pool.index
                others = (o for o in self._places - {kv} if o.slots[i : i + 1] == [slot])
                assert all(o.owned > i and o.ready <= kv.length for o in others)

    def _check_place(self, kv: KV) -> None:
        assert 0 <= kv.length <= kv.ready <= kv.written <= kv.reserved
        assert kv.ready == kv.length or kv.ready == kv.written == kv.owned * self.piece
        assert kv.owns_next or kv.owned == len(kv.slots) == self.pieces_for(kv.ready)
        assert len(kv.slots) <= self.slot_pieces
        assert set(kv.slots) <= set(range(self.n_slots))
        assert kv.runs == tuple(runs_of(kv.pieces, self.piece))

    def _extend(self, kv: KV, length: int) -> list[Run]:
        slots, freed = self.pool.extend(kv.slots, self.pieces_for(length))
        kv.lay(slots)
        return runs_of(freed, self.piece)

    def _extend_copied(self, kv: KV, length: int) -> tuple[list[Run], Copy]:
        """`_extend` where the last piece is partly filled and stays with others."""
        last = slot, i = kv.pieces[-1]
        kv.owned = i
        kv.lay(kv.slots[:i])
        dropped = self._extend(kv, length)
        freed = runs_of(self.pool.release([last]), self.piece)
        return dropped, Copy(slot, kv.slots[i], range(i * self.piece, kv.ready), tuple(freed))

    def _give_up(self, kv: KV, first: int) -> list[Run]:
        """Release the pieces from `first` on; returns these and what a failed step left."""
        return kv.left_over + runs_of(self.pool.release(kv.pieces[first:]), self.piece)

    def _must_copy(self, kv: KV, more: int) -> bool:
        """Whether the piece that the next row lies in stays as it is, for others to read.

        If only the index knows it and what follows it, that is worth a copy while there is room.
        """
        if kv.owns_next:
            return False
        last = kv.pieces[-1]
        has_room = self.free_pieces > more and self.free_places > 0  # a place less has a slot left
        return self.pool.is_shared(last) or (has_room and self.pool.index.has_more(last))

    def _full(self, needed: int) -> CacheFull:
        pieces, places = self.free_pieces, self.free_places
        return CacheFull(needed_pieces=needed, free_pieces=pieces, free_places=places)


def runs_of(pieces: Iterable[Piece], size: int) -> list[Run]:
    """The runs that `pieces` of `size` positions make, in their order."""
    runs: list[Run] = []
    for slot, i in pieces:
        start, stop = i * size, (i + 1) * size
        if runs and (runs[-1].slot, runs[-1].stop) == (slot, start):
            start = runs.pop().start
        runs.append(Run(slot, start, stop))
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """Bytes of the cache, as `/v1/capabilities` and the metrics show them."""

    bytes_total: int
    bytes_used: int  # held by sessions, each piece once
    bytes_shared: int  # of these, held by more than one
    bytes_cached: int  # kept for reuse only
    bytes_per_token: int

"""Which pieces are free, held and by how many, or only kept. Pure Python; the model thread.

A piece that places hold or that the index knows is in use. One that the index knows and no place
holds is *cached*: given up when its room is needed, the one used longest ago first.

Where the next piece of a place goes: behind the one before if that is free, so that it grows as
one run; else to the lowest empty slot, so that sessions at work tend to be neighbours, which
attention reads in one call (`model.attention`); else to the slot that has room for most of what is
to come. There is always one: a place that needs a piece holds none at that index, so the at most
`n_slots` places hold less than `n_slots` there, and what is not held is free or can be given up.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cache.prefixes import Piece, PrefixIndex


@dataclass(slots=True)
class Pool:
    """All pieces of `n_slots` slots, at most `total` of them in use at a time."""

    n_slots: int
    total: int
    index: PrefixIndex
    n_shared: int = field(init=False, default=0)  # held more than once
    n_given_up: int = field(init=False, default=0)  # cached ones, ever
    _holders: Counter[Piece] = field(init=False, default_factory=Counter)
    _cached: dict[Piece, None] = field(init=False, default_factory=dict)  # in order of use
    _in_use: Counter[int] = field(init=False, default_factory=Counter)  # by slot

    @property
    def n_held(self) -> int:
        """Pieces held, each counted once."""
        return len(self._holders)

    @property
    def n_cached(self) -> int:
        """Pieces kept for reuse only."""
        return len(self._cached)

    @property
    def n_free(self) -> int:
        """Pieces that can be taken, those included that are only cached."""
        return self.total - self.n_held

    def is_shared(self, piece: Piece) -> bool:
        """Whether more than one place holds it."""
        return self._holders[piece] > 1

    def is_fixed(self, piece: Piece) -> bool:
        """Whether anybody but the one that holds it may read it, so that it must not change."""
        return self.is_shared(piece) or piece in self.index

    def extend(self, slots: Sequence[int], n: int) -> tuple[list[int], list[Piece]]:
        """A table made `n` pieces long, and the cached pieces given up for that.

        There must be as many free ones.
        """
        table, freed = list(slots), self._make_room(n - len(slots))
        for i in range(len(slots), n):
            slot = self._slot_for(i, n, table[-1:])
            if slot is None:
                oldest = next(piece for piece in self._cached if piece[1] == i)
                freed += self.forget(oldest)
                slot = oldest[0]
            self.hold([(slot, i)])
            table.append(slot)
        return table, sorted(freed)

    def hold(self, pieces: Iterable[Piece]) -> None:
        """Count one more holder of each."""
        for piece in pieces:
            self._in_use[piece[0]] += self._is_free(piece)
            self._cached.pop(piece, None)
            self._holders[piece] += 1
            self.n_shared += self._holders[piece] == 2

    def release(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Count one holder less of each; returns those that are free now.

        Last to first, so that of what becomes cached the ends of chains are given up first.
        """
        freed = []
        for piece in reversed(pieces):
            self._holders[piece] -= 1
            self.n_shared -= self._holders[piece] == 1
            if not self._holders[piece]:
                del self._holders[piece]
                if piece in self.index:
                    self._cached[piece] = None
                else:
                    freed.append(piece)
        return self._free(freed)

    def forget(self, piece: Piece) -> list[Piece]:
        """Take a piece and all that follow it out of the index; returns those free now."""
        cached = [gone for gone in self.index.drop(piece) if gone in self._cached]
        for gone in cached:
            del self._cached[gone]
        self.n_given_up += len(cached)
        return self._free(cached)

    def check(self, tables: Iterable[Collection[Piece]]) -> None:
        """Prove the counts, given all places' pieces."""
        self.index.check()
        holders = Counter(piece for table in tables for piece in table)
        cached = [piece for piece in self.index if piece not in holders]
        assert self._holders == holders
        assert sorted(self._cached) == sorted(cached)
        assert +self._in_use == Counter(slot for slot, _ in [*holders, *cached])
        assert self.n_shared == sum(n > 1 for n in holders.values())
        assert len(holders) + len(cached) <= self.total

    def _make_room(self, n_new: int) -> list[Piece]:
        freed: list[Piece] = []
        while self.n_held + self.n_cached + n_new > self.total:
            freed += self.forget(next(iter(self._cached)))
        return freed

    def _slot_for(self, i: int, n: int, before: Sequence[int]) -> int | None:
        """Where a place has piece i, the piece before being in slot `before`, of the n it wants."""
        for slot in before:
            if self._is_free((slot, i)):
                return slot
        for slot in range(self.n_slots):
            if not self._in_use[slot]:
                return slot
        free = [slot for slot in range(self.n_slots) if self._is_free((slot, i))]
        return max(free, key=lambda slot: self._n_free_from(slot, i, n), default=None)

    def _n_free_from(self, slot: int, i: int, n: int) -> int:
        return next((j for j in range(i, n) if not self._is_free((slot, j))), n) - i

    def _is_free(self, piece: Piece) -> bool:
        return piece not in self._holders and piece not in self._cached

    def _free(self, pieces: list[Piece]) -> list[Piece]:
        """Count them out, in order, so that those that touch can be dropped together."""
        self._in_use.subtract(slot for slot, _ in pieces)
        return sorted(pieces)

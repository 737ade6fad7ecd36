"""Which session has which place in the cache, and who makes room. The model thread.

Places are kept in order of use, those used longest ago first. A session that is not at work can
lose its place to one that is; its ids are kept elsewhere, and its K/V is rebuilt when it is touched
again. Room is reserved whole before the first step, so no step can run out of it and nothing
waits for room that only it could free.
"""

from collections.abc import Callable, Container

from cache.accounting import KV
from cache.kv import KVCache
from engine.errors import NoRoom


class Places:
    """Session ids and their places. `at_work` tells which must not lose theirs."""

    def __init__(self, cache: KVCache, at_work: Callable[[], Container[str]]) -> None:
        self._cache = cache
        self._at_work = at_work
        self._places: dict[str, KV] = {}  # in order of use
        self.evictions = 0

    def n_rows(self, session_id: str) -> int:
        """How many of the session's tokens have their K/V here. Any thread."""
        kv = self._places.get(session_id)
        return 0 if kv is None else kv.length

    def take(self, session_id: str, *, kept: int, length: int) -> KV:
        """A place with at most `kept` rows present and room for `length` positions.

        Raises:
            NoRoom: not even by evicting every session that is not at work. Nothing was changed.
        """
        self._make_room(session_id, length)
        kv = self._places.pop(session_id, None) or self._cache.open()
        self._places[session_id] = kv
        if kv.length > kept:
            self._cache.truncate(kv, kept)
        self._cache.reserve(kv, length)
        return kv

    def trim(self, session_id: str, length: int) -> None:
        """Keep the rows of the first `length` tokens and no room beyond them."""
        if session_id in self._places:
            self._cache.truncate(self._places[session_id], length)

    def forget(self, session_id: str) -> None:
        """Give the session's place back, if it has one."""
        kv = self._places.pop(session_id, None)
        if kv is not None:
            self._cache.close(kv)

    def check(self) -> None:
        """Prove that every place in the cache is some session's, and the cache's books."""
        slots = [kv.slot for kv in self._places.values()]
        assert len(set(slots)) == len(slots)
        ledger = self._cache.ledger
        assert len(slots) == ledger.n_slots - ledger.free_slots
        self._cache.check()

    def _make_room(self, session_id: str, length: int) -> None:
        victims = self._victims(session_id, length)
        if victims is None:
            raise NoRoom(
                needed_bytes=self._cache.bytes_for(length),
                total_bytes=self._cache.usage().bytes_total,
            )
        for victim in victims:
            self.forget(victim)
            self.evictions += 1

    def _victims(self, session_id: str, length: int) -> list[str] | None:
        """Sessions to evict, least recently used first, to make room; None: they cannot."""
        ledger = self._cache.ledger
        own = self._places.get(session_id)
        pieces = ledger.pieces_for(length) - (own.n_pieces if own else 0) - ledger.free_pieces
        slots = (0 if own else 1) - ledger.free_slots
        at_work = self._at_work()
        victims = []
        for other, kv in self._places.items():
            if pieces <= 0 and slots <= 0:
                break
            if other != session_id and other not in at_work:
                victims.append(other)
                pieces, slots = pieces - kv.n_pieces, slots - 1
        return victims if pieces <= 0 and slots <= 0 else None

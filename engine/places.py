"""Which session has which place in the cache, and who makes room. The model thread.

Places are kept in order of use, those used longest ago first. A session that is not at work can
lose its place to one that is; its ids are kept elsewhere, and its K/V is rebuilt when it is touched
again, as far as the cache does not still have it.
"""

from collections.abc import Callable, Hashable, Sequence, Set

from cache.accounting import KV
from cache.kv import KVCache
from engine.errors import NoRoom
from sessions.session import Session


class Places:
    """Session ids and their places. `at_work` tells which must not lose theirs."""

    def __init__(self, cache: KVCache, at_work: Callable[[], Set[str]]) -> None:
        self._cache = cache
        self._at_work = at_work
        self._places: dict[str, KV] = {}  # in order of use
        self._evicted = dict.fromkeys(("room", "preempted"), 0)  # sessions, by reason

    @property
    def evicted(self) -> dict[str, int]:
        """What was given up for room so far, by reason. Any thread."""
        return {**self._evicted, "prefix": self._cache.dropped_cached}

    def n_rows(self, session_id: str) -> int:
        """How many of the session's tokens have their K/V here. Any thread."""
        kv = self._places.get(session_id)
        return 0 if kv is None else kv.length

    def take(
        self, session: Session, *, step_keys: Sequence[Hashable], reusable: int, length: int
    ) -> KV:
        """A place with room for `length` positions, whose rows are those of these steps.

        What was stepped after the session's last commit is dropped. Rows of the first `reusable`
        steps may be found in the cache, whichever session of the same owner computed them.

        Raises:
            NoRoom: not even by evicting every session that is not at work. Nothing was changed.
        """
        kv = self._places.pop(session.id, None) or self._open(length)
        self._places[session.id] = kv
        self._cache.truncate(kv, session.past_length)
        n_rows = kv.length
        self._cache.adopt(kv, session.owner, step_keys, limit=reusable)
        try:
            self.grow(session.id, length)
        except NoRoom:
            self.trim(session.id, n_rows)
            if not n_rows:
                self.forget(session.id)
            raise
        return kv

    def grow(self, session_id: str, length: int) -> None:
        """Room for `length` positions in the place that the session has.

        Raises:
            NoRoom: as `take`.
        """
        kv = self._places[session_id]
        while self._cache.pieces_needed(kv, length) > self._cache.free_pieces:
            if not self._can_have(kv, length):
                raise self.no_room(length)
            self._evict(session_id)
        self._cache.reserve(kv, length)

    def check_possible(self, length: int) -> None:
        """See that `length` positions fit into the cache if nobody else had anything.

        Raises:
            NoRoom: they never will.
        """
        if self._cache.bytes_for(length) > self._cache.usage().bytes_total:
            raise self.no_room(length)

    def no_room(self, length: int) -> NoRoom:
        """The refusal of `length` positions, to be raised."""
        return NoRoom(
            needed_bytes=self._cache.bytes_for(length),
            total_bytes=self._cache.usage().bytes_total,
        )

    def branch(self, session: Session) -> None:
        """Give a new session what its parent, if it has one, has of its rows. It may be nothing."""
        if session.parent is None:
            return
        parent_id = session.parent.id
        parent = self._places.pop(parent_id, None)
        if parent is None:
            return
        self._places[parent_id] = parent  # it was used
        if self._cache.free_places:
            self._places[session.id] = self._cache.fork(parent, session.past_length)

    def index(self, session: Session) -> None:
        """Let the owner's other sessions find what this one has committed."""
        kv = self._places.get(session.id)
        if kv is not None and self._cache.has_news(kv):
            self._cache.index(kv, session.owner, session.step_keys)

    def trim(self, session_id: str, length: int) -> None:
        """Keep the rows of the first `length` tokens and no room beyond them."""
        if session_id in self._places:
            self._cache.truncate(self._places[session_id], length)

    def evict(self, session_id: str, reason: str) -> None:
        """Take the session's place from it, for others."""
        self.forget(session_id)
        self._evicted[reason] += 1

    def forget(self, session_id: str) -> None:
        """Give the session's place back, if it has one."""
        kv = self._places.pop(session_id, None)
        if kv is not None:
            self._cache.close(kv)

    def check(self) -> None:
        """Prove that every place in the cache is some session's, and the cache's books."""
        assert len(set(map(id, self._places.values()))) == len(self._places)
        assert len(self._places) == self._cache.n_places
        self._cache.check()

    def _open(self, length: int) -> KV:
        if not self._cache.free_places:
            if not self._idle():
                raise self.no_room(length)
            self._evict()
        return self._cache.open()

    def _evict(self, sparing: str = "") -> None:
        """The session that was used longest ago, of those that are not at work."""
        self.evict(next(other for other in self._idle() if other != sparing), "room")

    def _idle(self) -> list[str]:
        at_work = self._at_work()
        return [session_id for session_id in self._places if session_id not in at_work]

    def _can_have(self, kv: KV, length: int) -> bool:
        """Whether there would be room if every session that is not at work were evicted."""
        at_work = self._at_work()
        others = [
            other
            for session_id, other in self._places.items()
            if session_id in at_work and other is not kv
        ]
        return self._cache.fits(kv, length, beside=others)

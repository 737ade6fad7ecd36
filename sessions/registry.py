"""Which sessions exist, whose they are, and when they expire. Pure Python; the event loop only.

It holds the last published value of each session. Nothing here waits and nothing here computes.

A session's time to live is idle time, counted from the end of the last request that touched it:

    publish ── using ──── end ───────── ttl ─────────┬───────── ttl ─────────┐
       living, never expires │ living, and idle      │ tombstone: 410        │ unknown: 404

Time alone moves a session along this line: `find` and `page` see it at once, `expire` collects it.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sessions.edits import STEP_BYTES
from sessions.errors import SessionExpired, SessionNotFound, TooManySessions
from sessions.holdings import EditHoldings
from sessions.session import Session


@dataclass(frozen=True, slots=True)
class Page:
    """Some of an owner's sessions, newest first, and whether older ones follow."""

    sessions: tuple[Session, ...]
    has_more: bool


@dataclass(slots=True)
class _Entry:
    """What is known of one session. Times in seconds of the registry's clock."""

    session: Session
    idle_since: float
    n_requests: int = 0  # in flight, of any kind
    busy: bool = False  # with a mutation

    @property
    def in_use(self) -> bool:
        return self.busy or self.n_requests > 0

    def expires(self, now: float) -> float:
        return (now if self.in_use else self.idle_since) + self.session.ttl_seconds

    def forgotten(self, now: float) -> float:
        """When the tombstone goes."""
        return self.expires(now) + self.session.ttl_seconds


class Registry:
    """Sessions by id.

    `clock` tells seconds, of any origin. `max_sessions` bounds the living ones together with the
    opens in flight.
    """

    def __init__(self, *, clock: Callable[[], float], max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.edits = EditHoldings()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # in the order they were opened
        self._tombstones: dict[str, _Entry] = {}
        self._removed: dict[str, _Entry] = {}  # and still in use: a late publish may come
        self._n_places_held = 0

    def __len__(self) -> int:
        """Living sessions."""
        now = self._clock()
        return sum(now < entry.expires(now) for entry in self._entries.values())

    @property
    def edit_bytes(self) -> int:
        """About what the histories of all living sessions hold in edits."""
        n_edited = sum(len(entry.session.edits) for entry in self._entries.values())
        return self.edits.n_bytes + n_edited * STEP_BYTES

    @staticmethod
    def new_id() -> str:
        """An id that nobody can guess."""
        return f"sess_{secrets.token_hex(16)}"

    # Sessions as the model thread's commits left them

    def publish(self, session: Session) -> bool:
        """Insert a session, or replace it by its newer value; returns whether it lives.

        A session that was removed while in use stays removed: publish before `clear_busy` or the
        end of `using`, and a commit that was under way cannot bring it back.
        """
        if session.id in self._removed or session.id in self._tombstones:
            return False
        entry = self._entries.get(session.id)
        self.edits.exchange(entry.session.edit_sizes if entry else {}, session.edit_sizes)
        if entry is None:
            self._entries[session.id] = _Entry(session, idle_since=self._clock())
        else:
            entry.session = session
        return True

    def find(self, session_id: str, owner: str = "") -> Session:
        """The last published value of an owner's session. Does not touch it: `using` does.

        Raises:
            SessionNotFound: unknown, removed, or another owner's.
            SessionExpired: it was idle for too long, and its tombstone lasts.
        """
        return self._living(session_id, owner).session

    def page(self, owner: str = "", *, limit: int, after: str | None = None) -> Page:
        """An owner's sessions, newest first, from the one that follows `after`.

        Raises:
            SessionNotFound: `after` is no living session of this owner.
            SessionExpired: as `find`.
        """
        if after is not None:
            self._living(after, owner)
        older = self._newest_first(owner, after)
        sessions = [session for _, session in zip(range(limit), older, strict=False)]
        return Page(tuple(sessions), has_more=next(older, None) is not None)

    def remove(self, session_id: str) -> None:
        """Forget a session, leaving no tombstone. Unknown ones are no error."""
        entry = self._entries.pop(session_id, None)
        if entry is None:
            return
        self.edits.exchange(entry.session.edit_sizes, {})
        if entry.in_use:
            self._removed[session_id] = entry

    # Requests in flight

    @contextmanager
    def using(self, session_id: str) -> Iterator[None]:
        """Mark a request in flight: the session does not expire until all of them have ended.

        Raises:
            SessionNotFound, SessionExpired: as `find`.
        """
        self.begin(session_id)
        try:
            yield
        finally:
            self.end(session_id)

    def begin(self, session_id: str) -> None:
        """Begin a request; every `begin` has its `end`, though the session be removed meanwhile."""
        self._living(session_id).n_requests += 1

    def end(self, session_id: str) -> None:
        """End a request; the session is idle from now if it was the last."""
        entry = self._used(session_id)
        assert entry.n_requests > 0, "a request ended that had not begun"
        entry.n_requests -= 1
        self._rest(session_id, entry)

    def is_busy(self, session_id: str) -> bool:
        """Whether a mutation is under way."""
        entry = self._entries.get(session_id) or self._removed.get(session_id)
        return entry is not None and entry.busy

    def mark_busy(self, session_id: str) -> None:
        """Begin a mutation, of which there is one at a time: ask `is_busy` first."""
        entry = self._living(session_id)
        assert not entry.busy, "two mutations of one session"
        entry.busy = True

    def clear_busy(self, session_id: str) -> None:
        """End a mutation; the session is idle from now if nothing else uses it."""
        entry = self._used(session_id)
        assert entry.busy, "a mutation ended that had not begun"
        entry.busy = False
        self._rest(session_id, entry)

    # Time

    def expires(self, session: Session) -> float:
        """When the session would expire if nothing touched it from now on, in clock seconds."""
        now = self._clock()
        entry = self._entries.get(session.id)
        return now + session.ttl_seconds if entry is None else entry.expires(now)

    def expire(self) -> list[Session]:
        """Collect the sessions whose idle time is over; each is returned once."""
        now = self._clock()
        self._tombstones = {
            session_id: entry
            for session_id, entry in self._tombstones.items()
            if now < entry.forgotten(now)
        }
        over = [entry for entry in self._entries.values() if entry.expires(now) <= now]
        return [self._bury(entry) for entry in over]

    # Room

    def check_place(self) -> None:
        """See that one more session may be opened.

        Raises:
            TooManySessions: as many live, or are being opened, as are allowed.
        """
        if len(self) + self._n_places_held >= self.max_sessions:
            raise TooManySessions(self.max_sessions)

    def hold_place(self) -> None:
        """Hold the place of a session that is being opened.

        Raises:
            TooManySessions: as `check_place`.
        """
        self.check_place()
        self._n_places_held += 1

    def release_place(self) -> None:
        """Give a held place back: the session is published, or will never be."""
        assert self._n_places_held > 0, "a place was released that was not held"
        self._n_places_held -= 1

    def check(self) -> None:
        """Assert what always holds."""
        kinds = (self._entries, self._tombstones, self._removed)
        ids = [session_id for kind in kinds for session_id in kind]
        assert len(ids) == len(set(ids)), "a session is one of living, expired, removed"
        for kind in kinds:
            assert all(session_id == entry.session.id for session_id, entry in kind.items())
        assert all(entry.n_requests >= 0 for kind in kinds for entry in kind.values())
        assert all(entry.in_use for entry in self._removed.values())
        assert not any(entry.in_use for entry in self._tombstones.values())
        assert self._n_places_held >= 0

    def _bury(self, entry: _Entry) -> Session:
        """Leave a tombstone, without the history."""
        session = entry.session
        del self._entries[session.id]
        self.edits.exchange(session.edit_sizes, {})
        entry.session = session.truncated(0)
        self._tombstones[session.id] = entry
        return session

    def _living(self, session_id: str, owner: str | None = None) -> _Entry:
        entry = self._entries.get(session_id) or self._tombstones.get(session_id)
        now = self._clock()
        if entry is None or entry.forgotten(now) <= now:
            raise SessionNotFound(session_id)
        if owner is not None and owner != entry.session.owner:
            raise SessionNotFound(session_id)
        if entry.expires(now) <= now:
            raise SessionExpired(session_id)
        return entry

    def _used(self, session_id: str) -> _Entry:
        return self._entries.get(session_id) or self._removed[session_id]

    def _rest(self, session_id: str, entry: _Entry) -> None:
        """The end of a use: idle from now; a removed one is forgotten with its last use."""
        entry.idle_since = self._clock()
        if not entry.in_use:
            self._removed.pop(session_id, None)

    def _newest_first(self, owner: str, after: str | None) -> Iterator[Session]:
        now = self._clock()
        entries = reversed(self._entries.values())
        if after is not None:
            for entry in entries:
                if entry.session.id == after:
                    break
        for entry in entries:
            if entry.session.owner == owner and now < entry.expires(now):
                yield entry.session

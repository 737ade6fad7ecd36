"""What the server may ask of the engine: typed values, built on the event loop.

Token ids are already validated and tokenized here; lengths and rooms are checked on admission.
Pure Python; no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from embedding.tokenizer import END_OF_TEXT
from engine.errors import ReplyTooLarge
from model.points import Point
from model.sampling import Sampling
from sessions.edits import Intervention


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimit:
    """What one JSON answer may hold, by the server's estimates of one encoded record.

    `hold` is told how many bytes that is, and may refuse them by raising.
    """

    bytes_per_record: int  # with its points
    bare_bytes_per_record: int  # without
    max_bytes: int
    hold: Callable[[int], None]

    def take(self, *, n_records: int, n_full: int) -> None:
        """Take the room of `n_records`, of which `n_full` carry points.

        Raises:
            ReplyTooLarge: more than are allowed.
        """
        n_bare = n_records - n_full
        n_bytes = n_full * self.bytes_per_record + n_bare * self.bare_bytes_per_record
        if n_bytes > self.max_bytes:
            raise ReplyTooLarge(n_bytes=n_bytes, max_bytes=self.max_bytes)
        self.hold(n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Which internals a request reports, and at which absolute positions (None: all it steps)."""

    points: tuple[Point, ...] = ()
    positions: frozenset[int] | None = None
    top_logprobs: int | None = None  # None: no logprobs at all; 0: the token's own only

    def wants_points_at(self, position: int) -> bool:
        """Whether the record at `position` carries points."""
        return bool(self.points) and (self.positions is None or position in self.positions)

    def first_computed(self, start: int, *, edited: bool) -> int | None:
        """The first position from `start` on that has to be computed, whatever is cached.

        `edited`: some steps are, so that nothing is what the tables say.
        """
        if self.top_logprobs is not None:
            return start
        if not self.points or (not edited and all(point.is_looked_up for point in self.points)):
            return None
        if self.positions is None:
            return start
        return min((p for p in self.positions if p >= start), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Step the client's tokens."""

    session_id: str
    token_ids: tuple[int, ...]
    owner: str = ""
    past_length: int | None = None  # expected by the client
    prepend_bos: bool = False
    interventions: tuple[Intervention, ...] = ()
    capture: Capture = field(default_factory=Capture)
    atomic: bool = True  # commit once, after the last step; False: chunk by chunk
    reply_limit: ReplyLimit | None = None  # None: no limit, as for a stream

    @property
    def all_ids(self) -> tuple[int, ...]:
        """The tokens to step."""
        return ((END_OF_TEXT,) if self.prepend_bos else ()) + self.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Step tokens that the server samples."""

    session_id: str
    owner: str = ""
    past_length: int | None = None
    max_tokens: int | None = None  # None: all that remains
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    interventions: tuple[Intervention, ...] = ()
    capture: Capture = field(default_factory=Capture)
    atomic: bool = True  # commit once, after the last step; False: step by step
    reply_limit: ReplyLimit | None = None  # None: no limit, as for a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A new session, with a first append if there are tokens."""

    token_ids: tuple[int, ...] = ()
    prepend_bos: bool = False
    owner: str = ""
    ttl_seconds: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    record: tuple[Point, ...] = ()  # kept at every step, for `Read`

    @property
    def all_ids(self) -> tuple[int, ...]:
        """The tokens to step."""
        return ((END_OF_TEXT,) if self.prepend_bos else ()) + self.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """Roll a session back to its first `to` tokens."""

    session_id: str
    to: int
    owner: str = ""
    past_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A new session that begins with the first `at` tokens of another and steps its own.

    `replay`: the other's tokens from `at` on are stepped again before them. `keep_edits`: as they
    were edited there; new interventions come after.
    """

    session_id: str
    at: int | None = None  # None: all of them
    owner: str = ""
    past_length: int | None = None  # of the parent, expected by the client
    replay: bool = False
    keep_edits: bool = True
    token_ids: tuple[int, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    capture: Capture = field(default_factory=Capture)
    reply_limit: ReplyLimit | None = None
    ttl_seconds: int | None = None  # None: the parent's
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Internals of committed positions: of `capture.positions`, or all.

    The session stays as it is and may be at work. What is cached is read, without writing anything;
    what is not is computed. `fresh`: all of it is computed, whatever is cached.
    """

    session_id: str
    owner: str = ""
    past_length: int | None = None
    capture: Capture
    fresh: bool = False
    atomic: bool = True
    reply_limit: ReplyLimit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Steps that nobody keeps, after the first `at` tokens of a session, or of none.

    The session's own tokens `at`..`stop` - 1 are stepped again, then `token_ids`. Records come of
    `capture.positions` only, or of all that is stepped. `of_study`: the study is in the queue, and
    its cells are not counted.
    """

    session_id: str | None = None
    at: int = 0
    stop: int | None = None  # None: `at`
    owner: str = ""
    keep_edits: bool = True
    token_ids: tuple[int, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    capture: Capture
    atomic: bool = True
    reply_limit: ReplyLimit | None = None
    of_study: bool = False

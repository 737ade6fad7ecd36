"""What the server may ask of the engine: typed values, built on the event loop.

Token ids are already validated and tokenized here; lengths and rooms are checked on admission.
Pure Python; no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import ReplyTooLarge
from model.points import Point
from model.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Which internals a request reports, and at which absolute positions (None: all it steps).

    `bytes_per_record` and `bare_bytes_per_record` are the server's estimates of one encoded record
    with its points and without, used only against `max_reply_bytes`. None there: the answer is a
    stream and has no limit.
    """

    points: tuple[Point, ...] = ()
    positions: frozenset[int] | None = None
    top_logprobs: int | None = None  # None: no logprobs at all; 0: the token's own only
    bytes_per_record: int = 0
    bare_bytes_per_record: int = 0
    max_reply_bytes: int | None = None

    def wants_points_at(self, position: int) -> bool:
        """Whether the record at `position` carries points."""
        return bool(self.points) and (self.positions is None or position in self.positions)

    def check_reply(self, n_new: int) -> None:
        """See that an answer of `n_new` records is within its limit.

        Raises:
            ReplyTooLarge: about how large it would be.
        """
        if self.max_reply_bytes is None:
            return
        n_full = n_new if self.positions is None else len(self.positions)
        n_bytes = n_full * self.bytes_per_record + (n_new - n_full) * self.bare_bytes_per_record
        if n_bytes > self.max_reply_bytes:
            raise ReplyTooLarge(n_bytes=n_bytes, max_bytes=self.max_reply_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Step the client's tokens."""

    session_id: str
    token_ids: tuple[int, ...]
    owner: str = ""
    past_length: int | None = None  # expected by the client
    prepend_bos: bool = False
    capture: Capture = field(default_factory=Capture)
    atomic: bool = True  # commit once, after the last step; False: chunk by chunk


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
    capture: Capture = field(default_factory=Capture)
    atomic: bool = True  # commit once, after the last step; False: step by step


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A new session, with a first append if there are tokens."""

    token_ids: tuple[int, ...] = ()
    prepend_bos: bool = False
    owner: str = ""
    ttl_seconds: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """Roll a session back to its first `to` tokens."""

    session_id: str
    to: int
    owner: str = ""
    past_length: int | None = None

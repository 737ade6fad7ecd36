"""One session's history and the transitions it allows. Pure Python, any thread.

A `Session` is a value: a transition returns another one. The model thread makes transitions, the
log keeps them, the event loop publishes them, and none of the three can see a half-made change.
What can be rebuilt (K/V) is not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sessions.errors import LengthOutOfRange


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a fork left its parent."""

    id: str
    past_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a client owns: committed token ids and what was said at `open`.

    `created` is in unix seconds; `ttl_seconds` is idle time, counted by the registry.
    """

    id: str
    created: float
    ttl_seconds: int
    owner: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    parent: Parent | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def past_length(self) -> int:
        """Committed tokens; the next token's position."""
        return len(self.token_ids)

    def committed(self, token_ids: tuple[int, ...]) -> "Session":
        """This session with `token_ids` stepped after its last token."""
        return replace(self, token_ids=self.token_ids + token_ids)

    def truncated(self, to: int) -> "Session":
        """This session rolled back to its first `to` tokens.

        Raises:
            LengthOutOfRange: `to` is negative or beyond `past_length`.
        """
        if not 0 <= to <= self.past_length:
            raise LengthOutOfRange(to=to, past_length=self.past_length)
        return replace(self, token_ids=self.token_ids[:to])

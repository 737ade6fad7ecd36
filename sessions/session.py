"""One session's history and the transitions it allows. Pure Python, any thread.

A `Session` is a value: a transition returns another one. The model thread makes transitions, the
log keeps them, the event loop publishes them, and none of the three can see a half-made change.
What can be rebuilt (K/V) is not here.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from sessions.edits import StepEdits, sizes_of, step_keys
from sessions.errors import LengthOutOfRange


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a fork left its parent."""

    id: str
    past_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a client owns: committed steps and what was said at `open`.

    `created` is in unix seconds; `ttl_seconds` is idle time, counted by the registry. `record`
    names points that are kept at every step, for as long as there is room.
    """

    id: str
    created: float
    ttl_seconds: int
    owner: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    parent: Parent | None = None
    record: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    edits: Mapping[int, StepEdits] = field(default_factory=dict)  # by position, of edited steps
    edit_sizes: Mapping[bytes, int] = field(default_factory=dict)  # of the distinct ones, in bytes

    @property
    def past_length(self) -> int:
        """Committed tokens; the next token's position."""
        return len(self.token_ids)

    @property
    def step_keys(self) -> Sequence[Hashable]:
        """For each step what its keys and values depend on, those of the steps before it aside."""
        return step_keys(self.token_ids, self.edits)

    def committed(
        self, token_ids: tuple[int, ...], edits: Mapping[int, StepEdits] | None = None
    ) -> "Session":
        """This session with `token_ids` stepped after its last token, edited as `edits` says."""
        token_ids = self.token_ids + token_ids
        if not edits:
            return replace(self, token_ids=token_ids)
        new = sizes_of(chain.from_iterable(edits.values()))
        known = new.keys() <= self.edit_sizes.keys()
        return replace(
            self,
            token_ids=token_ids,
            edits={**self.edits, **edits},
            edit_sizes=self.edit_sizes if known else {**self.edit_sizes, **new},
        )

    def truncated(self, to: int) -> "Session":
        """This session rolled back to its first `to` tokens; edits of later ones are forgotten.

        Raises:
            LengthOutOfRange: `to` is negative or beyond `past_length`.
        """
        if not 0 <= to <= self.past_length:
            raise LengthOutOfRange(to=to, past_length=self.past_length)
        if to == self.past_length:
            return self
        edits = {position: made for position, made in self.edits.items() if position < to}
        return replace(
            self,
            token_ids=self.token_ids[:to],
            edits=edits,
            edit_sizes=sizes_of(chain.from_iterable(edits.values())),
        )

"""What was changed in a step: edits, as a session's history keeps them. Pure Python, any thread.

An edit is resolved: its numbers are here and not in another session or a file, so a history can be
replayed. Its digest says whether two steps were changed in the same way.
"""

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

Op = Literal["replace", "add", "scale", "project", "mask"]
Span = tuple[int, int | None]  # positions first..stop-1; None: without an end

_EDIT_BYTES = 64  # of one edit of one step, without its numbers


@dataclass(frozen=True, slots=True)
class Value:
    """Numbers of an edit. `data` is little-endian float32."""

    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", hashlib.sha256(self.data).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change of one point, x being what the step has there.

    replace   value
    add       x + scale * value
    scale     scale * x
    project   x + (scale - 1) (x.u) u, u = value / |value|
    mask      -inf at `keys`, before the softmax; of `scores` only
    """

    point: str = field(compare=False)  # canonical, with its units: "z.9[6]"
    op: Op = field(compare=False)
    value: Value | None = field(default=None, compare=False)
    scale: float = field(default=1.0, compare=False)
    keys: tuple[Span, ...] = field(default=(), compare=False)  # positions of keys that are masked
    digest: bytes = field(init=False, repr=False)  # of all the others

    def __post_init__(self) -> None:
        value = self.value and (self.value.shape, self.value.sha256)
        told = repr((self.point, self.op, value, float(self.scale), self.keys))
        object.__setattr__(self, "digest", hashlib.sha256(told.encode()).digest())

    @property
    def n_bytes(self) -> int:
        """About what it holds in memory."""
        return _EDIT_BYTES + (len(self.value.data) if self.value else 0)


StepEdits = tuple[Edit, ...]
"""All edits of one step. Those of one point are applied in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """An edit of every step at positions in `spans`; None: of all that a request steps."""

    edit: Edit
    spans: tuple[Span, ...] | None = None

    def covers(self, position: int) -> bool:
        """Whether the step at `position` is edited."""
        return self.spans is None or within(self.spans, position)


def within(spans: Iterable[Span], position: int) -> bool:
    """Whether one of `spans` holds `position`."""
    return any(first <= position and (stop is None or position < stop) for first, stop in spans)


def edits_at(interventions: Sequence[Intervention], position: int) -> StepEdits:
    """The edits of the step at `position`."""
    return tuple(one.edit for one in interventions if one.covers(position))


@lru_cache(maxsize=4096)  # most steps of a history are edited alike
def step_digest(edits: StepEdits) -> bytes:
    """Of one step's edits, in their order."""
    return hashlib.sha256(b"".join(edit.digest for edit in edits)).digest()


def step_keys(token_ids: Sequence[int], edits: Mapping[int, StepEdits]) -> Sequence[Hashable]:
    """What tells steps apart, and so their keys and values: the id, and how it was edited."""
    if not edits:
        return token_ids
    return tuple(
        (token_id, step_digest(edits[position])) if position in edits else token_id
        for position, token_id in enumerate(token_ids)
    )

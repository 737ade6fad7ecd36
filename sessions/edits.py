"""What was changed in a step: edits, as a session's history keeps them. Pure Python, any thread.

An edit is resolved: its numbers are here and not in another session or a file, so a history can be
replayed. Its digest says whether two steps were changed in the same way.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Op = Literal["replace", "add", "scale", "project", "mask"]
Span = tuple[int, int | None]  # positions first..stop-1; None: without an end

_EDIT_BYTES = 512  # of one edit, without its numbers
STEP_BYTES = 128
"""About what it takes to note that a step was edited, beside the edits themselves."""


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

    def __post_init__(self) -> None:
        if self.spans is not None:
            object.__setattr__(self, "spans", joined(self.spans))

    def covers(self, position: int) -> bool:
        """Whether the step at `position` is edited."""
        return self.spans is None or within(self.spans, position)


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions in ascending spans that do not touch."""
    apart: list[Span] = []
    for first, stop in sorted(spans, key=lambda span: span[0]):
        before = apart[-1] if apart else (first, first - 1)
        if before[1] is None:
            break
        if first > before[1]:
            apart.append((first, stop))
        else:
            apart[-1] = before[0], None if stop is None else max(before[1], stop)
    return tuple(apart)


def within(spans: Sequence[Span], position: int) -> bool:
    """Whether one of `spans` holds `position`; they are as `joined` has them."""
    place = bisect_right(spans, position, key=lambda span: span[0])
    if not place:
        return False
    stop = spans[place - 1][1]
    return stop is None or position < stop


def edits_at(interventions: Sequence[Intervention], position: int) -> StepEdits:
    """The edits of the step at `position`."""
    return tuple(one.edit for one in interventions if one.covers(position))


def sizes_of(edits: Iterable[Edit]) -> dict[bytes, int]:
    """What the distinct ones of `edits` hold, in bytes, by digest."""
    return {edit.digest: edit.n_bytes for edit in edits}


def step_keys(token_ids: Sequence[int], edits: Mapping[int, StepEdits]) -> Sequence[Hashable]:
    """What tells steps apart, and so their keys and values: the id, and how it was edited."""
    if not edits:
        return token_ids
    return tuple(
        (token_id, *(edit.digest for edit in edits[position])) if position in edits else token_id
        for position, token_id in enumerate(token_ids)
    )

"""Answers of studies, as OpenAPI documents them: see `server.answers`. Pure Python."""

from typing import Literal

from pydantic import BaseModel

from server.answers import EmbedSteps, SessionState, Tensor, Usage


class Activations(EmbedSteps):
    """Internals of committed steps."""

    object: Literal["activations"]  # type: ignore[assignment]  # a kind of its own
    source: Literal["recorded", "rebuilt"]
    session: SessionState
    usage: Usage


class Place(BaseModel):
    """Where the largest difference is."""

    position: int
    index: list[int]


class Verified(BaseModel):
    """Cached against computed. A difference that is not finite is null."""

    object: Literal["verify"]
    past_length: int
    max_abs_diff: dict[str, float | None]
    max_rel_diff: dict[str, float | None]
    where: dict[str, Place | None]
    greedy_equal: bool | None
    usage: Usage
    aliases: dict[str, str] = {}


class Distances(BaseModel):
    """One point of two sessions, by position; null where it is not finite or not defined."""

    l2: list[float | None]
    norm_a: list[float | None]
    norm_b: list[float | None]
    cosine: list[float | None]
    kl_ab: list[float | None] = []
    kl_ba: list[float | None] = []


class BothUsages(BaseModel):
    """What reading the two sessions cost."""

    a: Usage
    b: Usage


class Compared(BaseModel):
    """Two sessions, by position."""

    object: Literal["comparison"]
    a: str
    b: str
    positions: list[int]
    points: dict[str, Distances]
    usage: BothUsages
    aliases: dict[str, str] = {}


class SweptAxis(BaseModel):
    """One dimension of a grid."""

    name: Literal["layer", "position", "head"]
    values: list[int]


class SweepUsage(BaseModel):
    """What a grid cost."""

    cells: int
    steps: int


class Swept(BaseModel):
    """A grid: tensors with its axes first, what the session has there, and what the source has."""

    object: Literal["sweep"]
    at: int
    axes: list[SweptAxis]
    points: dict[str, Tensor]
    baseline: dict[str, Tensor]
    source: dict[str, Tensor] | None
    usage: SweepUsage
    aliases: dict[str, str] = {}

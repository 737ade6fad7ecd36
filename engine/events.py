"""What the engine tells the server: typed values, read on the event loop.

A request's events are `Started`, any number of `Progress`, and exactly one terminal event, `Done`
or `Failed`. Each is released only after the log has kept what it reports. Captured points are
float32 numpy arrays. Pure Python and numpy; no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.errors import EngineError
from model.points import Point
from sessions.edits import StepEdits
from sessions.session import Session

RECORD_BYTES = 512
"""About what a record without points weighs in a reader's buffer."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest ids at a position, natural log."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step.

    `logprob` and `top_logprobs` score this record's own token from the row before it; None where
    they were not asked for, and at position 0.
    """

    index: int  # within this request
    position: int
    token_id: int
    text: str  # what a reader may show now
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] | None = None
    points: Mapping[Point, npt.NDArray[np.float32]] = field(default_factory=dict)
    edits: StepEdits = ()  # that were made in it
    finish_reason: str | None = None  # "length" or "stop"
    stop_reason: str | int | None = None  # the stop string or token id that ended it

    @property
    def n_bytes(self) -> int:
        """About what it weighs in a reader's buffer."""
        return RECORD_BYTES + sum(array.nbytes for array in self.points.values())


@dataclass(frozen=True, slots=True)
class Recorded:
    """Points of one step that its session keeps."""

    position: int
    points: Mapping[Point, npt.NDArray[np.float32]]

    @property
    def n_bytes(self) -> int:
        """What they hold."""
        return sum(array.nbytes for array in self.points.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost."""

    steps: int = 0
    cached_tokens: int = 0  # tokens whose K/V was found or read instead of computed
    rebuilt_tokens: int = 0  # committed tokens stepped again because their K/V was evicted
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request has its room and will be stepped."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Records of one iteration, committed. `session` is as that commit left it."""

    session: Session
    records: tuple[StepRecord, ...]
    recorded: tuple[Recorded, ...] = ()  # for `engine.recordings`, not for the client


@dataclass(frozen=True, slots=True)
class Done:
    """The request ended well. An atomic request's records come all here, in `records`."""

    session: Session
    usage: Usage
    records: tuple[StepRecord, ...] = ()
    recorded: tuple[Recorded, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended badly. `session` is as its last commit left it; None: there is none."""

    error: EngineError
    session: Session | None


Event = Started | Progress | Done | Failed

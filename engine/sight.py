"""What one job shows of its steps, and what was read for it so far. Numpy; the model thread.

Points come from the pass that computes a step, but for those that are rows of the head's product:
`logits` and `lens` are read afterwards, many rows at once, and wait here for their record.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.commands import Capture
from engine.events import StepRecord, TopLogprob
from model.batch import Captured, Floats
from model.points import LENS_TOP, Point
from model.sampling import largest, logprobs

LogitsRow = Floats  # [V]
_Score = tuple[float, tuple[TopLogprob, ...]]


class Sight:
    """`capture` is what the request asked for; `record` is kept of every step besides."""

    def __init__(self, capture: Capture, record: Sequence[Point] = ()) -> None:
        points = tuple(sorted({*capture.points, *record}))
        self.capture = capture
        self._recorded = tuple(record)
        self.points = points
        self.passed = tuple(point for point in points if point.name != "logits")
        self._logits = [point for point in points if point.name == "logits"]
        self._lens = [point for point in points if point.name == "lens"]
        self._n_records = 0
        self._read: dict[int, dict[Point, Floats]] = {}  # by position
        self._scores: dict[int, _Score] = {}  # by position

    @property
    def head_rows(self) -> int:
        """Rows of the head's product that each step costs; what samples an id is not counted."""
        scored = bool(self._logits) or self.capture.top_logprobs is not None
        return scored + len(self._lens)

    def shows(self, position: int) -> bool:
        """Whether a request that steps nothing of its own reports this position."""
        return self.capture.positions is None or position in self.capture.positions

    def sees(self, position: int) -> bool:
        """Whether points of this step are wanted."""
        return bool(self._recorded) or self.capture.wants_points_at(position)

    def first_computed(self, start: int, *, edited: bool) -> int | None:
        """The first position from `start` on that has to be computed, whatever is cached."""
        return start if self._recorded else self.capture.first_computed(start, edited=edited)

    def forget(self) -> None:
        """What was read is read again."""
        self._read.clear()

    # Rows of the head's product.

    def wants_logits(self, position: int) -> bool:
        """Whether the row of logits at `position` is to be shown."""
        return bool(self._logits) and self.sees(position)

    def lenses(self, captured: Captured, place: int) -> list[tuple[Point, Floats]]:
        """The rows [C] that the pass left for the head, of one captured token."""
        return [(point, captured[point][place]) for point in self._lens]

    def take_logits(self, position: int, row: LogitsRow) -> None:
        """Keep what is shown of a row of logits: a copy, since a view would keep its mates'."""
        own = {point: _copied(point.select(row)) for point in self._logits}
        self._read.setdefault(position, {}).update(own)

    def take_lens(self, position: int, point: Point, row: LogitsRow) -> None:
        """Keep the likeliest ids and their logits, [2, LENS_TOP]: best first."""
        ids = largest(row, LENS_TOP)
        ids = ids[np.argsort(-row[ids], kind="stable")]
        both = np.stack([ids.astype(np.float32), row[ids]])
        self._read.setdefault(position, {})[point] = point.select(both)

    def score(self, position: int, row: LogitsRow, token_id: int) -> None:
        """Score the token at `position` by the row before it, if that is asked for."""
        if self.capture.top_logprobs is None:
            return
        logprob, top = logprobs(row, token_id, self.capture.top_logprobs)
        self._scores[position] = logprob, tuple(TopLogprob(i, lp) for i, lp in top)

    def is_scored(self, position: int) -> bool:
        """Whether `score` was told of the token at `position`."""
        return position in self._scores

    # Records.

    def record(
        self, position: int, captured: Captured, place: int | None, **facts: Any
    ) -> StepRecord:
        """The record of a step; `place` is its place among those `captured`, if it is one of them.

        What is kept besides is copied: a view would keep the rest of its pass.
        """
        arrays: dict[Point, Floats] = {}
        if place is not None:
            arrays = {point: captured[point][place] for point in self.passed}
            arrays |= self._read.pop(position, {})
        shown = self.capture.points if self.capture.wants_points_at(position) else ()
        logprob, top = self._scores.pop(position, (None, None))
        self._n_records += 1
        return StepRecord(
            index=self._n_records - 1,
            position=position,
            logprob=logprob,
            top_logprobs=top,
            points={point: arrays[point] for point in shown},
            recorded={point: _copied(arrays[point]) for point in self._recorded},
            **facts,
        )


def _copied(array: Floats) -> Floats:
    return np.array(array, dtype=np.float32)

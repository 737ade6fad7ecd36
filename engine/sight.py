"""What one job shows of its steps, and what was read for it so far. Numpy; the model thread.

Points come from the pass that computes a step, but for those that are rows of the head's product:
`logits` and `lens` are read afterwards, many rows at once, and wait here for their record.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.commands import Capture
from engine.events import RECORD_BYTES, Recorded, StepRecord, TopLogprob
from engine.limits import CAPTURE_BYTES, LOGITS_ROWS
from engine.recordings import Recordings
from model.batch import Captured, Floats
from model.config import GPT2Config
from model.points import LENS_TOP, Point
from model.sampling import largest, logprobs

LogitsRow = Floats  # [V]
_Score = tuple[float, tuple[TopLogprob, ...]]


class Sight:
    """`capture` is what the request asked for; `kept` points are recorded of every step besides."""

    def __init__(
        self,
        capture: Capture,
        kept: Sequence[Point],
        recordings: Recordings,
        config: GPT2Config,
    ) -> None:
        points = tuple(sorted({*capture.points, *kept}))
        self.capture = capture
        self._recorded: list[Recorded] = []  # and not handed over yet
        self._kept = tuple(kept)
        self._recordings = recordings
        self.points = points
        self.passed = tuple(point for point in points if point.name != "logits")
        self._logits = [point for point in points if point.name == "logits"]
        self._lens = [point for point in points if point.name == "lens"]
        self._seen_bytes = sum(point.n_bytes(config) for point in points)
        self._shown_bytes = sum(point.n_bytes(config) for point in capture.points)
        self._n_records = 0
        self._read: dict[int, dict[Point, Floats]] = {}  # by position
        self._scores: dict[int, _Score] = {}  # by position

    def at_once(self, positions: range) -> int:
        """How many of the next positions one iteration may step, by what is to be seen of them."""
        rows = n_bytes = 0
        for n, position in enumerate(positions if self.points or self._is_scored else ()):
            rows += self._head_rows(position)
            n_bytes += self._seen_bytes * self.sees(position)
            if n and (rows > LOGITS_ROWS or n_bytes > CAPTURE_BYTES):
                return n
        return len(positions)

    def weight(self, position: int) -> int:
        """About what the record of a step weighs in a reader's buffer."""
        return RECORD_BYTES + self._shown_bytes * self.capture.wants_points_at(position)

    def _head_rows(self, position: int) -> int:
        """Rows of the head's product that a step costs; what samples an id is not counted."""
        if not self.sees(position):
            return self._is_scored
        return (bool(self._logits) or self._is_scored) + len(self._lens)

    @property
    def _is_scored(self) -> bool:
        return self.capture.top_logprobs is not None

    def shows(self, position: int) -> bool:
        """Whether a request that steps nothing of its own reports this position."""
        return self.capture.positions is None or position in self.capture.positions

    def sees(self, position: int) -> bool:
        """Whether points of this step are wanted."""
        return bool(self._kept) or self.capture.wants_points_at(position)

    def first_computed(self, start: int, *, edited: bool) -> int | None:
        """The first position from `start` on that has to be computed, whatever is cached."""
        return start if self._kept else self.capture.first_computed(start, edited=edited)

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
        """The record of a step; `place`: where it is among those `captured`, if it is one."""
        arrays: dict[Point, Floats] = {}
        if place is not None:
            arrays = {point: captured[point][place] for point in self.passed}
            arrays |= self._read.pop(position, {})
        shown = self.capture.points if self.capture.wants_points_at(position) else ()
        logprob, top = self._scores.pop(position, (None, None))
        self._n_records += 1
        if self._kept:
            self._record_for_later(position, arrays)
        return StepRecord(
            index=self._n_records - 1,
            position=position,
            logprob=logprob,
            top_logprobs=top,
            points={point: self._own(arrays[point]) for point in shown},
            **facts,
        )

    def hand_over(self) -> tuple[Recorded, ...]:
        """What was recorded since the last time."""
        recorded, self._recorded = tuple(self._recorded), []
        return recorded

    def _own(self, array: Floats) -> Floats:
        """A view of what was captured, unless that is more than what is shown."""
        return _copied(array) if self._kept else array

    def _record_for_later(self, position: int, arrays: Mapping[Point, Floats]) -> None:
        n_bytes = sum(arrays[point].nbytes for point in self._kept)
        if self._recordings.take(n_bytes):
            own = {point: _copied(arrays[point]) for point in self._kept}
            self._recorded.append(Recorded(position, own))


def _copied(array: Floats) -> Floats:
    return np.array(array, dtype=np.float32)

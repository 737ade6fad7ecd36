"""Captured points of many positions in one array each, as they come. Numpy, any thread.

Points that grow with the position are padded with zeros on the right, and `n_keys` tells how many
numbers of a row are real.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.events import StepRecord
from model.config import GPT2Config
from model.points import Point

Array = npt.NDArray[np.floating]
Dtype = type[np.float32] | type[np.float16]
Records = Sequence[StepRecord]


def n_keys(points: Iterable[Point], positions: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """Keys of each position's row, [n_positions]; None where no point has any."""
    if any(point.is_ragged for point in points):
        return np.array(positions, np.int64) + 1
    return None


class Rows(Protocol):
    """Takes records in order of position."""

    @property
    def arrays(self) -> Mapping[Point, Array]:
        """Complete after the last record."""
        ...

    def take(self, records: Records) -> None:
        """Add some records."""
        ...


class Stacked:
    """Every position's row: arrays [n_positions, ...] of `dtype`."""

    def __init__(
        self,
        points: Sequence[Point],
        positions: Sequence[int],
        config: GPT2Config,
        dtype: Dtype = np.float32,
    ) -> None:
        """`positions` are at least one."""
        last = max(positions)
        self.arrays: Mapping[Point, Array] = {
            point: np.zeros((len(positions), *point.shape(config, last)), dtype) for point in points
        }
        self._n_taken = 0

    def take(self, records: Records) -> None:
        """Add some records. Numbers that float16 cannot hold become infinite."""
        with np.errstate(over="ignore"):
            for index, record in enumerate(records, self._n_taken):
                for point, stacked in self.arrays.items():
                    row = record.points[point]
                    stacked[index][tuple(map(slice, row.shape))] = row
        self._n_taken += len(records)


class Mean:
    """The mean over all positions, summed in float64: arrays of the points' own shapes."""

    def __init__(
        self,
        points: Sequence[Point],
        positions: Sequence[int],
        config: GPT2Config,
        dtype: Dtype = np.float32,
    ) -> None:
        """`positions` are at least one; no point is ragged."""
        self._sums = {point: np.zeros(point.shape(config, 0)) for point in points}
        self._n_positions = len(positions)
        self._dtype = dtype

    def take(self, records: Records) -> None:
        """Add some records."""
        for record in records:
            for point, total in self._sums.items():
                total += record.points[point]

    @property
    def arrays(self) -> Mapping[Point, Array]:
        """The means. Numbers that float16 cannot hold become infinite."""
        with np.errstate(over="ignore"):
            return {
                point: (total / self._n_positions).astype(self._dtype)
                for point, total in self._sums.items()
            }

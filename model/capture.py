"""Copies of internals taken during one forward pass. Torch and numpy; the model thread.

A point is copied as it passes, for the tokens that asked for it, in one gather per point.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.batch import Captured, Row
from model.points import Point


class Taps:
    """What the rows of one pass want to see, and what was seen."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._wanted: dict[Point, list[int]] = {}  # flattened tokens, row by row
        self._seen: dict[Point, npt.NDArray[np.float32]] = {}
        first = 0
        for row in rows:
            tokens = [first + i for i in row.captured]
            for point in row.points if tokens else ():
                self._wanted.setdefault(point, []).extend(tokens)
            first += len(row.token_ids)

    def take(self, name: str, layer: int | None, x: Tensor) -> None:
        """Copy point `name.layer` of the wanted tokens out of x [N, C]."""
        tokens = self._wanted.get(Point(name, layer)) if self._wanted else None
        if tokens:
            copied = x.index_select(0, torch.tensor(tokens))
            self._seen[Point(name, layer)] = copied.float().numpy()

    def look_up(self, name: str, table: Tensor, keys: Callable[[Row], Sequence[int]]) -> None:
        """As `take`, of the rows of `table` that `keys` gives for a row's tokens."""
        if Point(name, None) not in self._wanted:
            return
        wanted = [row for row in self._rows if Point(name, None) in row.points]
        ids = [keys(row)[i] for row in wanted for i in row.captured]
        self._seen[Point(name, None)] = table.index_select(0, torch.tensor(ids)).numpy()

    def by_row(self, order: Sequence[int]) -> list[Captured]:
        """What each row captured; `order[i]` is the place of row i in the answer.

        Copied where there are several: a view would keep its mates' rows in memory too.
        """
        taken = dict.fromkeys(self._seen, 0)
        answer: list[Captured] = [{}] * len(self._rows)
        for place, row in zip(order, self._rows, strict=True):
            own = {}
            for point in row.points if row.captured else ():
                start = taken[point]
                taken[point] = start + len(row.captured)
                rows = self._seen[point][start : taken[point]]
                own[point] = rows if len(order) == 1 else rows.copy()
            answer[place] = own
        return answer

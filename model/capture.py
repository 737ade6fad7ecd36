"""Copies of internals, from where a pass has them to those who asked. Torch; the model thread.

Rows that ask for the same points share a sheet: a line for each captured token, all its points side
by side. A point is copied once into the sheet for all of them, and in the end each row is handed
its own lines in one piece. Views of a common sheet would keep its mates' lines in memory too.

    sheet      point 0 | point 1 | ...
    row A   t  ........|.........|....       A's block: its two lines
            t  ........|.........|....
    row B   t  ........|.........|....       B's block

What grows with the position (`scores`, `pattern`) lies beside the sheet, one array per token.

Legend: n captured tokens of a sheet, width: floats of one line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from model.batch import Captured, Floats, Row
from model.config import GPT2Config
from model.points import Point

ARENA_BYTES = 32 * 1024**2  # of sheets that are allocated once; larger ones come and go
_LAYOUTS = 256

Index = slice | Tensor


def index_of(places: Sequence[int]) -> Index:
    """What selects `places` of an axis: a slice, which copies nothing, where they are in line."""
    first, stop = places[0], places[0] + len(places)
    in_line = list(places) == list(range(first, stop))
    return slice(first, stop) if in_line else torch.tensor(places)


class Column(NamedTuple):
    """Where one point lies in a line. `span` is None for what lies beside the sheet."""

    point: Point
    shape: tuple[int, ...]
    span: slice | None
    units: Tensor | None

    def selected(self, x: Tensor) -> Tensor:
        """The units of x [n, ...], which has the whole point of n tokens."""
        return x if self.units is None else x.index_select(1 + self.point.unit_axis, self.units)


class Layout:
    """The columns of one selection."""

    def __init__(self, points: Sequence[Point], config: GPT2Config) -> None:
        self.columns: list[Column] = []
        self.width = 0
        for point in points:
            self.columns.append(self._column(point, config))

    def _column(self, point: Point, config: GPT2Config) -> Column:
        is_lens = point.name == "lens"  # what is captured is the row that the head multiplies
        shape = (config.n_embd,) if is_lens else point.shape(config, 0)
        units = None if is_lens or point.units is None else torch.tensor(point.units)
        if point.is_ragged:
            return Column(point, shape, None, units)
        start, self.width = self.width, self.width + prod(shape)
        return Column(point, shape, slice(start, self.width), units)


@dataclass(slots=True)
class Sheet:
    """What the rows with one selection capture in one pass."""

    layout: Layout
    rows: list[tuple[int, int]] = field(default_factory=list)  # row of the pass, tokens captured
    tokens: list[int] = field(default_factory=list)
    index: Index = field(init=False)
    lines: Tensor = field(init=False)  # [n, width]
    beside: dict[tuple[Point, int], Floats] = field(default_factory=dict)  # by point and token

    def take(self, column: Column, x: Tensor, index: Index) -> None:
        """Copy a column out of x [..., whole point], in which the sheet's tokens are at `index`."""
        self.lines[:, column.span].copy_(column.selected(x[index]).flatten(1))

    def take_beside(self, column: Column, token: int, x: Tensor) -> None:
        """Copy what one token has at a column that grows: x [H, keys]."""
        own = column.selected(x.unsqueeze(0))[0]
        self.beside[column.point, token] = np.array(own.numpy(), np.float32)

    def handed_over(self) -> Iterator[tuple[int, Captured]]:
        """Each row's captured points, which are its own from now on."""
        lines = self.lines.numpy()
        start = 0
        for row, n in self.rows:
            stop = start + n
            own = lines if len(self.rows) == 1 else lines[start:stop].copy()
            yield row, self._points(own, self.tokens[start:stop])
            start = stop

    def _points(self, lines: Floats, tokens: Sequence[int]) -> Captured:
        points: dict[Point, Sequence[Floats]] = {}
        for point, shape, span, _ in self.layout.columns:
            if span is None:
                points[point] = [self.beside[point, token] for token in tokens]
            else:
                own = lines[:, span]
                stacked = own if len(shape) == 1 else own.reshape(len(tokens), *shape)
                points[point] = cast("Sequence[Floats]", stacked)
        return points


class Sheets:
    """Makes the sheets of one model's passes, in memory that they take turns in."""

    def __init__(self, config: GPT2Config) -> None:
        self._layout = lru_cache(_LAYOUTS)(lambda points: Layout(points, config))
        self._arena = torch.empty(0)

    def of(self, rows: Sequence[Row], firsts: Sequence[int]) -> list[Sheet]:
        """Blank sheets for all who capture; `firsts[i]` is the first token of row i."""
        sheets: dict[tuple[Point, ...], Sheet] = {}
        for i, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            if not row.points or not row.captured:
                continue
            sheet = sheets.get(row.points)
            if sheet is None:
                sheet = sheets[row.points] = Sheet(self._layout(row.points))
            sheet.rows.append((i, len(row.captured)))
            sheet.tokens += [first + place for place in row.captured]
        self._give_room(list(sheets.values()))
        return list(sheets.values())

    def _give_room(self, sheets: Sequence[Sheet]) -> None:
        """The sheet of one row is handed over as it is; the others are copied from the arena."""
        shared = [sheet for sheet in sheets if len(sheet.rows) > 1]
        sizes = [len(sheet.tokens) * sheet.layout.width for sheet in shared]
        parts = iter(torch.split(self._arena_of(sum(sizes)), sizes) if sizes else ())
        for sheet in sheets:
            sheet.index = index_of(sheet.tokens)
            n, width = len(sheet.tokens), sheet.layout.width
            alone = len(sheet.rows) == 1
            sheet.lines = torch.empty(n, width) if alone else next(parts).view(n, width)

    def _arena_of(self, n_floats: int) -> Tensor:
        if n_floats * torch.float32.itemsize > ARENA_BYTES:
            return torch.empty(n_floats)
        if len(self._arena) < n_floats:
            self._arena = torch.empty(n_floats)
        return self._arena[:n_floats]

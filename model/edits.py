"""Edits made ready: numbers decoded, units found, applied to tensors. Torch; the model thread.

`sessions.edits` says what an edit is; the arithmetic is here, in float32 and row by row, so that a
token's edited tensor does not depend on which others are edited with it.

Legend: n tokens that are edited alike.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.config import GPT2Config
from model.points import Point, parse_point
from sessions.edits import Edit, Span, Value

_KEPT = 128  # edits; a value is at most a layer's heads over all keys or over the width


class Change(NamedTuple):
    """One edit, ready to be made."""

    edit: Edit
    point: Point
    value: Tensor | None
    units: Tensor | None

    def make(self, x: Tensor) -> None:
        """Edit x [n, ...] in place: float32, the point of n tokens."""
        if self.units is None:
            x.copy_(self._changed(x))
            return
        axis = 1 + self.point.unit_axis
        x.index_copy_(axis, self.units, self._changed(x.index_select(axis, self.units)))

    def _changed(self, x: Tensor) -> Tensor:
        """What x, which the units are already taken of, becomes."""
        if self.edit.op == "mask":
            return _masked(x, self.edit.keys)
        if self.point.name == "scores" and self.edit.op != "replace":
            return self._changed_where_seen(x)
        return self._computed(x)

    def _changed_where_seen(self, x: Tensor) -> Tensor:
        """What is masked stays so: arithmetic with -inf could make it anything."""
        hidden = x.isneginf()
        return self._computed(x.masked_fill(hidden, 0.0)).masked_fill(hidden, -torch.inf)

    def _computed(self, x: Tensor) -> Tensor:
        if self.value is None:
            return x * self.edit.scale
        assert self.value.shape == x.shape[1:], f"{self.point} is {list(x.shape[1:])}"
        match self.edit.op:
            case "add":
                return x + self.edit.scale * self.value
            case "project":
                along = (x * self.value).flatten(1).sum(1)  # [n]
                along = along.view(-1, *[1] * self.value.dim())
                return x + (self.edit.scale - 1) * along * self.value
        return self.value.expand_as(x)


class Changes:
    """Edits of one model, the latest of them kept ready."""

    def __init__(self, config: GPT2Config) -> None:
        self._config = config
        self.ready = lru_cache(_KEPT)(self._ready)

    def _ready(self, edit: Edit) -> Change:
        point = parse_point(edit.point, self._config)
        assert point.is_editable, f"{point} is derived"
        units = None if point.units is None else torch.tensor(point.units)
        value = None if edit.value is None else _decoded(edit.value)
        if value is not None and edit.op == "project":
            value = _unit(value)
        return Change(edit, point, value, units)


def _masked(scores: Tensor, keys: tuple[Span, ...]) -> Tensor:
    masked = scores.clone()
    for first, stop in keys:
        masked[..., first:stop] = -torch.inf
    return masked


def _unit(value: Tensor) -> Tensor:
    """Its direction. Squares of finite float32 numbers fit float64, however large or small."""
    wide = value.double()
    return wide.div_(torch.linalg.vector_norm(wide)).float()


def _decoded(value: Value) -> Tensor:
    numbers = np.frombuffer(value.data, dtype="<f4").astype(np.float32)
    return torch.from_numpy(numbers.reshape(value.shape))

"""Edits with random numbers of the right shapes."""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from model.config import GPT2Config
from model.points import parse_point
from sessions.edits import Edit, Op, Span, Value

OPS: tuple[Op, ...] = tuple(op for op in get_args(Op) if op != "mask")


def value_of(numbers: npt.ArrayLike) -> Value:
    array = np.asarray(numbers, "<f4")
    return Value(array.shape, array.tobytes())


def drawn(point: str, op: Op, position: int, config: GPT2Config, seed: int = 0) -> Edit:
    """An edit of one point at one position. Its numbers lie around 1, so that none is near 0."""
    random = np.random.default_rng([seed, position])
    shape = parse_point(point, config).shape(config, position)
    value = None if op == "scale" else value_of(random.uniform(0.4, 1.6, shape))
    return Edit(point=point, op=op, value=value, scale=float(random.uniform(0.4, 1.6)))


def mask(point: str, *keys: Span) -> Edit:
    return Edit(point=point, op="mask", keys=keys)


def add(point: str, numbers: npt.ArrayLike, scale: float = 1.0) -> Edit:
    return Edit(point=point, op="add", value=value_of(numbers), scale=scale)


def replace(point: str, numbers: npt.ArrayLike) -> Edit:
    return Edit(point=point, op="replace", value=value_of(numbers))


def scale(point: str, factor: float) -> Edit:
    return Edit(point=point, op="scale", scale=factor)


def project(point: str, numbers: Sequence[float], factor: float) -> Edit:
    return Edit(point=point, op="project", value=value_of(numbers), scale=factor)

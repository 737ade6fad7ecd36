"""Hugging Face's and nnsight's names by value: what a module takes and gives is the point's."""

import pytest
import torch
from torch import Tensor

from model.points import Point, parse_points
from tests.agreement import assert_agrees
from tests.hooked import NAMES, Values, value, values
from tests.lively import SMALL, in_transformers, lively_checkpoint
from tests.reference import reference_points

IDS = [464, 3290, 11, 11, 50256, 262, 1]


@pytest.fixture(scope="module")
def ours() -> dict[str, Tensor]:
    return reference_points(lively_checkpoint(), IDS)


@pytest.fixture(scope="module")
def theirs() -> Values:
    return values(in_transformers(lively_checkpoint()), IDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_holds_its_point(name: str, ours: dict[str, Tensor], theirs: Values) -> None:
    name = name.replace("{l}", "1")
    points = parse_points([name], SMALL).points

    expected = torch.cat([flat(point, ours) for point in points], dim=-1)

    assert_agrees(value(name, theirs).reshape(expected.shape), expected, what=name)


def flat(point: Point, points: dict[str, Tensor]) -> Tensor:
    """One row for each token, heads side by side; of patterns one [T, T] for each head."""
    whole = points[str(point)]
    return whole.transpose(0, 1) if point.axes[-1] == "key" else whole.flatten(1)

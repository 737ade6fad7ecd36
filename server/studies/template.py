"""From a sweep's template to the interventions of its cells. Pure Python, any thread.

A cell fills in what the axes say, here layer 3 and position 7:

    {"point": "resid_pre", "op": "replace", "value": {"session": "sess_..."}}

    {"point": "resid_pre.3", "positions": "7", "op": "replace",
     "value": {"session": "sess_...", "position": 7}}
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from model.config import GPT2Config
from server.errors import Blamed, InvalidRequest
from server.inputs import parse_positions
from server.interventions.bodies import InterventionBody
from server.interventions.plan import Planned, check_masks, planned
from server.studies.bodies import SweptAxes
from sessions.edits import Value

MAX_CELLS = 4096
"""Of one sweep."""

FIELD = "intervention"
Template = Mapping[str, Any]
Place = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a grid."""

    name: str  # "layer", "position" or "head"
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes that are swept, the slowest first."""

    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells along each axis."""
        return tuple(len(axis.values) for axis in self.axes)

    @property
    def n_cells(self) -> int:
        """All of them."""
        return prod(self.shape)

    def places(self) -> Iterator[Place]:
        """Each cell's value of each axis, the last axis fastest."""
        names = [axis.name for axis in self.axes]
        for values in product(*(axis.values for axis in self.axes)):
            yield dict(zip(names, values, strict=True))


def grid_of(axes: SweptAxes, config: GPT2Config, past_length: int) -> Grid:
    """The grid that a body asks for.

    Raises:
        InvalidRequest: it names what the model or the session does not have, or is too large.
    """
    sizes = {"layer": config.n_layer, "position": past_length, "head": config.n_head}
    asked = ((name, getattr(axes, name), size) for name, size in sizes.items())
    grid = Grid(tuple(Axis(name, _values(t, n)) for name, t, n in asked if t is not None))
    if grid.n_cells > MAX_CELLS:
        raise InvalidRequest(f"{grid.n_cells} cells, over the limit of {MAX_CELLS}", param="axes")
    return grid


def _values(text: str, n: int) -> tuple[int, ...]:
    return tuple(range(n)) if text == "*" else tuple(sorted(parse_positions(text, n, param="axes")))


def plan_cells(template: Template, grid: Grid, config: GPT2Config) -> list[Planned]:
    """The intervention of each cell, in the order of `Grid.places`. Its own numbers are read once.

    Raises:
        RequestValidationError: the template is no intervention, even with what the axes say.
        Blamed: one of them cannot be made in this model.
    """
    cells: list[Planned] = []
    read: Value | None = None
    with in_template():
        _check_template(template, grid)
        for place in grid.places():
            cells.append(_planned(template, place, config, read))
            read = cells[0].source if isinstance(cells[0].source, Value) else None
    return cells


@contextmanager
def in_template() -> Iterator[None]:
    """Say of what is wrong with interventions inside that the template caused it."""
    try:
        yield
    except Blamed as error:
        raise Blamed(error.cause, param=FIELD) from error


def _check_template(template: Template, grid: Grid) -> None:
    swept = {axis.name for axis in grid.axes}
    if "position" in swept and template.get("positions") is not None:
        raise InvalidRequest("positions is what the position axis says", param=FIELD)


def _planned(template: Template, place: Place, config: GPT2Config, read: Value | None) -> Planned:
    one = planned(_body(filled(template, place)), config, place=_told(place), read=read)
    if "head" in place and one.point.axes[0] != "n_head":
        raise InvalidRequest(f"{one.point.whole} has no heads to sweep", param=FIELD)
    check_masks([one], range(config.n_ctx))
    return one


def _told(place: Place) -> str:
    return " at " + ", ".join(f"{name} {value}" for name, value in place.items())


def filled(template: Template, place: Place) -> dict[str, Any]:
    """The template with what one cell's place says."""
    body = dict(template)
    if isinstance(point := body.get("point"), str):
        body["point"] = _named(point, place)
    if "position" in place:
        body["positions"] = str(place["position"])
    if isinstance(value := body.get("value"), dict) and value.get("session") is not None:
        body["value"] = _filled_value(value, place)
    return body


def _filled_value(value: Template, place: Place) -> dict[str, Any]:
    """A session's value: of the same position and, if it names a point, of that in this layer."""
    filled = dict(value)
    if isinstance(point := filled.get("point"), str):
        if "head" in place and point.endswith("[*]"):
            point = f"{point.removesuffix('[*]')}[{place['head']}]"
        filled["point"] = point.replace("*", str(place["layer"])) if "layer" in place else point
    if "position" in place and filled.get("position") is None:
        filled["position"] = place["position"]
    return filled


def _named(point: str, place: Place) -> str:
    """`resid_pre` or `resid_pre.*` in its layer; `z` or `z[*]` of its head."""
    if "head" in place:
        point = point.removesuffix("[*]")
    if "layer" in place:
        layer = str(place["layer"])
        point = point.replace("*", layer) if "*" in point else f"{point}.{layer}"
    return f"{point}[{place['head']}]" if "head" in place else point


def _body(fields: Mapping[str, Any]) -> InterventionBody:
    try:
        return InterventionBody.model_validate(fields)
    except ValidationError as error:
        told = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(
            [{**line, "loc": ("body", FIELD, *line["loc"])} for line in told]
        ) from error

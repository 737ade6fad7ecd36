"""Templates and what the axes fill in. No server."""

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from model.config import GPT2Config
from server.errors import Blamed, InvalidRequest
from server.interventions.plan import Computed
from server.studies.bodies import SweptAxes
from server.studies.template import MAX_CELLS, Grid, filled, grid_of, plan_cells

CONFIG = GPT2Config(n_ctx=128, n_embd=32, n_layer=3, n_head=2)
SESSION = {"session": "sess_1"}


def grid(**axes: str) -> Grid:
    return grid_of(SweptAxes(**axes), CONFIG, 9)


@pytest.mark.parametrize(
    ("template", "place", "expected"),
    [
        ({"point": "resid_pre"}, {"layer": 3}, {"point": "resid_pre.3"}),
        ({"point": "resid_pre.*"}, {"layer": 3}, {"point": "resid_pre.3"}),
        ({"point": "hidden_states[*]"}, {"layer": 3}, {"point": "hidden_states[3]"}),
        (
            {"point": "blocks.*.attn.hook_z"},
            {"layer": 3, "head": 1},
            {"point": "blocks.3.attn.hook_z[1]"},
        ),
        ({"point": "z.4"}, {"head": 1}, {"point": "z.4[1]"}),
        ({"point": "z.*[*]"}, {"layer": 2, "head": 1}, {"point": "z.2[1]"}),
        (
            {"point": "z", "value": SESSION},
            {"layer": 2, "position": 7, "head": 0},
            {
                "point": "z.2[0]",
                "positions": "7",
                "value": {"session": "sess_1", "position": 7},
            },
        ),
        (
            {"point": "resid_mid", "value": SESSION | {"position": 3, "point": "resid_pre.*"}},
            {"layer": 2, "position": 7},
            {
                "point": "resid_mid.2",
                "positions": "7",
                "value": {"session": "sess_1", "position": 3, "point": "resid_pre.2"},
            },
        ),
        (
            {"point": "z", "value": SESSION | {"position": 3, "point": "z.0[*]"}},
            {"layer": 2, "head": 1},
            {"point": "z.2[1]", "value": {"session": "sess_1", "position": 3, "point": "z.0[1]"}},
        ),
        (
            {"point": "resid_mid.1", "value": {"vector": "vec_1"}},
            {"position": 7},
            {"point": "resid_mid.1", "positions": "7", "value": {"vector": "vec_1"}},
        ),
        ({"point": 5}, {"layer": 2}, {"point": 5}),
        ({}, {"layer": 2, "head": 1}, {}),
    ],
)
def test_a_place_fills_the_template(
    template: dict[str, Any], place: dict[str, int], expected: dict[str, Any]
) -> None:
    before = repr(template)
    assert filled(template, place) == expected
    assert repr(template) == before


def test_axes_are_values_in_order_and_star_is_all() -> None:
    all_of_it = grid(layer="*", position="5,1:3", head="1")
    assert [(axis.name, axis.values) for axis in all_of_it.axes] == [
        ("layer", (0, 1, 2)),
        ("position", (1, 2, 5)),
        ("head", (1,)),
    ]
    assert (all_of_it.shape, all_of_it.n_cells) == ((3, 3, 1), 9)
    assert list(grid(position="2:4", layer="1").places()) == [
        {"layer": 1, "position": 2},
        {"layer": 1, "position": 3},
    ]


@pytest.mark.parametrize(
    "axes", [{"layer": "3"}, {"layer": "0:4"}, {"position": "9"}, {"head": "2"}, {"head": "a"}]
)
def test_axes_name_what_there_is(axes: dict[str, str]) -> None:
    with pytest.raises(Blamed) as refused:
        grid(**axes)
    assert refused.value.param == "axes"


def test_the_number_of_cells_is_bounded() -> None:
    wide = GPT2Config(n_ctx=1024, n_embd=32, n_layer=4, n_head=2)
    assert grid_of(SweptAxes(layer="*", position="*"), wide, 1024).n_cells == MAX_CELLS
    with pytest.raises(InvalidRequest, match=f"8192 cells, over the limit of {MAX_CELLS}"):
        grid_of(SweptAxes(layer="*", position="*", head="*"), wide, 1024)


def test_each_cell_has_its_point_position_and_source() -> None:
    template = {"point": "z", "op": "replace", "value": SESSION}
    plan = plan_cells(template, grid(layer="1:3", position="4,6", head="*"), CONFIG)
    assert [str(one.point) for one in plan[:3]] == ["z.1[0]", "z.1[1]", "z.1[0]"]
    assert [one.spans for one in plan[:3]] == [((4, 5),), ((4, 5),), ((6, 7),)]
    assert plan[-1].source == Computed("sess_1", 6, plan[-1].point)
    assert {one.shape for one in plan} == {(1, 16)}


def test_patterns_of_each_position_have_the_keys_of_that_position() -> None:
    template = {"point": "pattern.1", "op": "replace", "value": SESSION}
    plan = plan_cells(template, grid(position="*"), CONFIG)
    assert [one.shape for one in plan] == [(2, p + 1) for p in range(9)]


@pytest.mark.parametrize(
    ("template", "axes", "message"),
    [
        ({"op": "scale", "scale": 0}, {"layer": "*"}, "point"),
        ({"point": "z", "op": "scale"}, {"layer": "*"}, "scale"),
        ({"point": "z", "op": "add"}, {"layer": "*"}, "value"),
        ({"point": "z", "op": "drop"}, {"layer": "*"}, "op"),
        ({"point": "z", "op": "scale", "scale": 0, "layers": "*"}, {"layer": "*"}, "layers"),
        ({"point": "z", "op": "replace", "value": SESSION}, {"layer": "*"}, "position"),
        ({"point": "z", "op": "scale", "scale": "0"}, {"layer": "*"}, "scale"),
    ],
)
def test_what_is_no_intervention_is_told_of_the_template(
    template: dict[str, Any], axes: dict[str, str], message: str
) -> None:
    with pytest.raises(RequestValidationError) as refused:
        plan_cells(template, grid(**axes), CONFIG)
    [error, *_] = refused.value.errors()
    assert error["loc"][:2] == ("body", "intervention")
    assert message in str(error["loc"]) + error["msg"]


@pytest.mark.parametrize(
    ("template", "axes"),
    [
        ({"point": "z", "op": "scale", "scale": 0}, {"position": "*"}),  # no layer
        ({"point": "z.*", "op": "scale", "scale": 0}, {"position": "*"}),  # all of them
        ({"point": "z.1", "op": "scale", "scale": 0}, {"layer": "*"}),  # it says one
        ({"point": "ln_f", "op": "scale", "scale": 0}, {"layer": "*"}),  # it has none
        ({"point": "logits", "op": "scale", "scale": 0}, {"position": "*"}),  # read-only
        ({"point": "lens", "op": "scale", "scale": 0}, {"layer": "*"}),
        ({"point": "mlp_post.1", "op": "scale", "scale": 0}, {"head": "*"}),  # neurons, not heads
        ({"point": "z.1[0]", "op": "scale", "scale": 0}, {"head": "*"}),
        ({"point": "z", "op": "mask", "keys": "1"}, {"layer": "*"}),
        ({"point": "scores.1", "op": "mask", "keys": "0"}, {"position": "*"}),  # all of 0's keys
        (
            {"point": "pattern.1", "op": "replace", "value": {"data": [[1.0], [1.0]]}},
            {"position": "*"},
        ),
        (
            {"point": "pattern.1", "op": "replace", "value": SESSION | {"position": 3}},
            {"position": "2:5"},
        ),
        ({"point": "resid_mid", "op": "add", "value": {"data": [1.0]}}, {"layer": "*"}),
        (
            {"point": "resid_mid", "op": "add", "value": SESSION | {"position": 1, "point": "q.0"}},
            {"layer": "*"},
        ),
        ({"point": "z.1", "positions": "3", "op": "scale", "scale": 0}, {"position": "*"}),
        ({"point": "z.1", "positions": "3:2", "op": "scale", "scale": 0}, {"head": "*"}),
    ],
)
def test_what_the_model_cannot_do_is_blamed_on_the_template(
    template: dict[str, Any], axes: dict[str, str]
) -> None:
    with pytest.raises((Blamed, InvalidRequest)) as refused:
        plan_cells(template, grid(**axes), CONFIG)
    assert refused.value.param == "intervention"

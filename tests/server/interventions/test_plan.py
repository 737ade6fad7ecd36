"""Interventions that are wrong in themselves, and what those that are right become."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from model.config import GPT2Config
from model.points import Point, all_points
from server.errors import Blamed, InvalidRequest
from server.interventions.bodies import MAX_INTERVENTIONS, InterventionBody
from server.interventions.plan import (
    MAX_SPANS,
    Computed,
    Kept,
    Planned,
    Weights,
    check_masks,
    plan_of,
)
from server.problems import problem, validation_problem
from server.schemas import AppendBody
from sessions.edits import Value

CONFIG = GPT2Config(n_ctx=16, n_embd=4, n_layer=2, n_head=2)
FOUR = {"data": [1, 2, 3, 4]}
ADD = {"point": "resid_post.0", "op": "add", "value": FOUR}
MASK = {"point": "scores.0", "op": "mask", "keys": "0"}


def plan(*interventions: dict[str, Any], config: GPT2Config = CONFIG) -> list[Planned]:
    text = json.dumps({"prompt": "a", "interventions": interventions})
    body = AppendBody.model_validate(json.loads(text))
    return asyncio.run(plan_of(body.interventions, config))


def told(*interventions: Any) -> dict[str, Any]:
    """The envelope of what is refused."""
    try:
        plan(*interventions)
    except ValidationError as error:
        lines = [{**line, "loc": ("body", *line["loc"])} for line in error.errors()]
        return validation_problem(lines).error
    except (Blamed, InvalidRequest) as error:
        return problem(error).error
    raise AssertionError("it is taken")


REFUSED: list[tuple[Any, str]] = [
    ({}, "Field required"),
    ({"point": "z.0"}, "Field required"),
    ("z.0", "dictionary"),
    (ADD | {"op": "set"}, "Input should be"),
    (ADD | {"opp": 1}, "unknown field opp"),
    (ADD | {"op": "scale"}, "scale takes no value"),
    (ADD | {"keys": "1"}, "add takes no keys"),
    (ADD | {"op": "replace", "scale": 1}, "replace takes no scale"),
    (ADD | {"scale": "1"}, "number"),
    (ADD | {"scale": True}, "number"),
    (ADD | {"scale": 1e39}, "less than"),
    ({"point": "z.0", "op": "scale"}, "scale needs scale"),
    ({"point": "z.0", "op": "add"}, "add needs value"),
    ({"point": "z.0", "op": "replace", "scale": None}, "replace needs value"),
    ({"point": "z.0", "op": "project", "scale": 0}, "project needs value"),
    ({"point": "scores.0", "op": "mask"}, "mask needs keys"),
    (MASK | {"scale": 0}, "mask takes no scale"),
    (MASK | {"value": FOUR}, "mask takes no value"),
    (MASK | {"point": "pattern.0"}, "mask is of scores"),
    (MASK | {"keys": ""}, "none of i, a:b"),
    (MASK | {"keys": "17"}, "no range of positions 0 to 15"),
    (ADD | {"positions": "x"}, "none of i, a:b"),
    (ADD | {"positions": 5}, "string"),
    (ADD | {"positions": "3:3"}, "no range"),
    (ADD | {"positions": "16:"}, "no range"),
    (ADD | {"positions": "٣"}, "none of"),
    (ADD | {"positions": "1" * 9000}, "8192"),
    (ADD | {"point": "resid_pots.0"}, "did you mean resid_post.0"),
    (ADD | {"point": "resid_post.2"}, "layers are 0 to 1"),
    (ADD | {"point": "resid_post.*"}, "stands for 2 points"),
    (ADD | {"point": "transformer.h.0.attn.c_attn"}, "stands for 3 points"),
    (ADD | {"point": "z.0[2]"}, "units of z.0 are 0 to 1"),
    (ADD | {"point": "logits"}, "read-only"),
    (ADD | {"point": "lens.0"}, "read-only"),
    (ADD | {"point": ""}, "at least 1"),
    (ADD | {"point": "z.0\ud83d"}, "surrogate"),
    (ADD | {"point": "q" * 257}, "at most 256"),
    (ADD | {"value": {}}, "give one of data, vector, session, param"),
    (ADD | {"value": {"data": None}}, "give one of"),
    (ADD | {"value": [1, 2, 3, 4]}, "dictionary"),
    (ADD | {"value": FOUR | {"vector": "v"}}, "give one of"),
    (ADD | {"value": {"vector": "v", "position": 1}}, "position says nothing of vector"),
    (ADD | {"value": {"vector": 5}}, "string"),
    (ADD | {"value": {"vector": "v\ud83d"}}, "surrogate"),
    (ADD | {"value": {"param": "wpe[0]", "point": "wpe"}}, "point says nothing of param"),
    (ADD | {"value": {"session": "s"}}, "needs its position"),
    (ADD | {"value": {"session": "s", "position": -1}}, "greater than or equal to 0"),
    (ADD | {"value": {"session": "s", "position": 1.0}}, "integer"),
    (ADD | {"value": {"session": "s", "position": 16}}, "none of 0 to 15"),
    (ADD | {"value": {"session": "s", "position": 0, "point": "q.0"}}, "[2, 2], and resid_post.0"),
    (ADD | {"value": {"session": "s", "position": 0, "point": "qq.0"}}, "unknown point"),
    (ADD | {"value": {"session": "s", "position": 0, "point": "logits"}}, "[50257]"),
    (ADD | {"value": {"data": 5}}, "list of numbers, or base64"),
    (ADD | {"value": {"data": {"0": 1}}}, "list of numbers, or base64"),
    (ADD | {"value": {"data": [1, 2, 3]}}, "shape is not [4]"),
    (ADD | {"value": {"data": [1, 2, 3, float("nan")]}}, "finite"),
    (ADD | {"value": {"data": "AAAA"}}, "base64 needs its shape"),
    (ADD | {"value": {"data": "AAAA", "shape": [4]}}, "no base64 of little-endian"),
    (ADD | {"value": {"data": "AAAA", "shape": [1]}}, "[1], and resid_post.0 has [4]"),
    (ADD | {"value": {"data": "AAAA", "shape": [2**62, 2**62]}}, "and resid_post.0 has [4]"),
    (ADD | {"value": FOUR | {"shape": [2, 2]}}, "[2, 2], and resid_post.0 has [4]"),
    (ADD | {"value": FOUR | {"shape": [1] * 9}}, "at most 8"),
    (ADD | {"value": FOUR | {"dtype": "float16"}}, "'float32'"),
    (ADD | {"value": FOUR | {"axes": ["d_head"]}}, "axes of resid_post.0 are n_embd"),
    (ADD | {"point": "z.0[1]"}, "shape is not [1, 2]"),
    (ADD | {"point": "pattern.0"}, "fits one position"),
    (ADD | {"point": "pattern.0", "positions": "3:"}, "fits one position"),
    (ADD | {"point": "scores.0", "positions": "1,3"}, "fits one position"),
    (ADD | {"point": "pattern.0[1]", "positions": "2"}, "shape is not [1, 3]"),
]


@pytest.mark.parametrize(("intervention", "message"), REFUSED)
def test_q14_what_is_wrong_is_told_with_its_place(intervention: Any, message: str) -> None:
    error = told(ADD, intervention)
    assert message in error["message"]
    assert error["message"].startswith("interventions[1]")
    assert error["param"] == "interventions"
    assert error["code"] in ("invalid_request", "unknown_point")


@pytest.mark.parametrize("value", [{}, "[]", 5, True, {"0": ADD}])
def test_interventions_are_a_list(value: Any) -> None:
    with pytest.raises(ValidationError) as raised:
        AppendBody.model_validate({"prompt": "a", "interventions": value})
    assert raised.value.errors()[0]["loc"] == ("interventions",)


def test_there_are_at_most_so_many() -> None:
    assert len(plan(*[ADD] * MAX_INTERVENTIONS)) == MAX_INTERVENTIONS
    assert told(*[ADD] * (MAX_INTERVENTIONS + 1))["param"] == "interventions"
    with pytest.raises(ValidationError) as raised:
        AppendBody.model_validate({"prompt": "a", "interventions": [5] * 100_000})
    assert raised.value.error_count() == 1


def test_spans_are_bounded_together() -> None:
    config = replace(CONFIG, n_ctx=64)
    scattered = ",".join(map(str, range(0, 64, 2)))  # 32 spans
    mask = MASK | {"positions": scattered, "keys": scattered}
    n = MAX_SPANS // 64
    assert len(plan(*[mask] * n, config=config)) == n
    with pytest.raises(InvalidRequest, match="over 1024 spans") as raised:
        plan(*[mask] * n, MASK, config=config)
    assert raised.value.param == "interventions"


def test_what_is_read() -> None:
    add, scale, project, mask = plan(
        ADD | {"positions": "10:, 3"},
        {"point": "blocks.1.attn.hook_z[1]", "op": "scale", "scale": 0},
        {"point": "q.0", "op": "project", "value": {"vector": "v"}},
        MASK | {"positions": ":", "keys": "4:6,5:7"},
    )
    assert add.spans == ((3, 4), (10, None))
    assert add.source == Value((4,), np.array([1, 2, 3, 4], "<f4").tobytes())
    assert (add.scale, project.scale, scale.scale) == (1.0, 0.0, 0.0)
    assert (scale.point, scale.spans, scale.source) == (Point("z", 1, (1,)), None, None)
    assert (project.source, project.shape, project.n_bytes) == (Kept("v"), (2, 2), 16)
    assert (mask.spans, mask.keys, mask.n_bytes) == (((0, None),), ((4, 7),), 0)


def test_values_elsewhere() -> None:
    here, there, row = plan(
        ADD | {"value": {"session": "s", "position": 7}},
        ADD | {"value": {"session": "s", "position": 7, "point": "hidden_states[1]"}},
        ADD | {"value": {"param": "wpe[0]"}},
    )
    assert here.source == Computed("s", 7, Point("resid_post", 0))
    assert there.source == Computed("s", 7, Point("resid_pre", 1))
    assert row.source == Weights("wpe[0]")


def test_a_tensor_is_taken_as_answers_have_it() -> None:
    tensor = {
        "dtype": "float32",
        "shape": [2, 3],
        "axes": ["n_head", "key"],
        "data": [[1, 2, 3], [4, 5, 6]],
    }
    (one,) = plan({"point": "pattern.0", "positions": "2", "op": "replace", "value": tensor})
    assert isinstance(one.source, Value)
    assert one.source.shape == (2, 3)


def test_all_but_derived_points_can_be_edited() -> None:
    points = [point for point in all_points(CONFIG) if point.is_editable]
    assert {point.name for point in all_points(CONFIG)} - {point.name for point in points} == {
        "lens",
        "logits",
    }
    bodies = [{"point": str(point), "op": "scale", "scale": 2} for point in points]
    assert [one.point for one in plan(*bodies)] == points


def listed(positions: set[int]) -> str:
    return ",".join(map(str, positions))


def leaves_none(keys: set[int], positions: set[int] | None, stepped: range) -> bool:
    """Whether some step is left no key, step by step."""
    edited = [p for p in stepped if positions is None or p in positions]
    return any(set(range(p + 1)) <= keys for p in edited)


SOME = st.sets(st.integers(0, 15), min_size=1)
STEPPED = st.builds(range, st.integers(0, 15), st.integers(0, 16))


@given(SOME, st.none() | SOME, STEPPED)
@settings(deadline=None, max_examples=100)
def test_a_mask_leaves_every_step_a_key(
    keys: set[int], positions: set[int] | None, stepped: range
) -> None:
    where = {} if positions is None else {"positions": listed(positions)}
    found = plan(MASK | where | {"keys": listed(keys)})
    if not leaves_none(keys, positions, stepped):
        check_masks(found, stepped)
        return
    with pytest.raises(Blamed, match=r"interventions\[0\]: it leaves the step at \d+ no key"):
        check_masks(found, stepped)


FEW = st.sets(st.integers(0, 4), min_size=1)
POINTS = st.sampled_from(["scores.0", "scores.0[0]", "scores.0[1]", "scores.1"])
MASKS = st.lists(st.tuples(st.just("mask"), POINTS, FEW, FEW), min_size=1, max_size=6)
REPLACED: st.SearchStrategy[Any] = st.tuples(
    st.just("replace"), POINTS, st.just(set()), FEW.map(lambda p: {min(p)})
)


@given(MASKS, st.none() | REPLACED, st.integers(0, 6))
@settings(deadline=None, max_examples=200)
def test_masks_together_leave_every_head_of_every_step_a_key(
    masks: list[Any], replaced: Any, place: int
) -> None:
    """Against sets, step by step; scores that are replaced are masked no more."""
    made = masks[:place] + [replaced] * (replaced is not None) + masks[place:]
    refused = None
    for position in range(1, 5):
        left = {(layer, head): set(range(position + 1)) for layer in "01" for head in "01"}
        for i, (op, point, keys, positions) in enumerate(made):
            heads = [key for key in left if key[0] == point[7] and point[9:10] in ("", key[1])]
            for key in heads if position in positions else ():
                left[key] = left[key] - keys if op == "mask" else set(range(position + 1))
                if not left[key] and refused is None:
                    refused = f"interventions[{i}]: it leaves the step at {position} no key"
    found = plan(*[intervention(*one) for one in made])
    if refused is None:
        check_masks(found, range(1, 5))
        return
    with pytest.raises(Blamed, match=re.escape(refused)):
        check_masks(found, range(1, 5))


def intervention(op: str, point: str, keys: set[int], positions: set[int]) -> dict[str, Any]:
    where = {"point": point, "op": op, "positions": listed(positions)}
    if op == "mask":
        return where | {"keys": listed(keys)}
    n_heads = 1 if "[" in point else 2
    return where | {"value": {"data": [[0.0] * (min(positions) + 1)] * n_heads}}


def test_scores_that_are_replaced_are_masked_no_more() -> None:
    halves = [MASK | {"keys": "0"}, MASK | {"keys": "1:"}]
    found = plan(halves[0], intervention("replace", "scores.0", set(), {2}), halves[1])
    check_masks(found, range(2, 3))
    with pytest.raises(Blamed, match=r"interventions\[2\]: it leaves the step at 3 no key"):
        check_masks(found, range(2, 4))


def test_open_masks() -> None:
    check_masks(plan(MASK | {"keys": "1:"}), range(16))
    for keys in (":", "0:", ":9"):
        with pytest.raises(Blamed, match="step at 8"):
            check_masks(plan(MASK | {"keys": keys}), range(8, 9))
    check_masks(plan(MASK | {"keys": ":8"}), range(8, 16))
    check_masks(plan(MASK | {"keys": ":", "positions": ":8"}), range(8, 16))
    check_masks(plan(MASK | {"keys": ":"}), range(0))


def test_nulls_are_defaults() -> None:
    body = {"positions": None, "scale": None, "keys": None}
    assert InterventionBody.model_validate(ADD | body).factor == 1.0

"""Activation patching: each cell a fork that replays a tail, and whole grids by sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from engine.commands import Capture
from engine.events import StepRecord
from model.points import Point, parse_point
from sessions.edits import Edit, Intervention
from tests.agreement import assert_agrees
from tests.engine.editing import value
from tests.engine.rig import CONFIG, LIVELY, Rig, in_loop, running, some_ids
from tests.lens.oracle import Lens
from tests.lively import save_lively
from tests.server.serving import Serving, serving

pytestmark = pytest.mark.lens

CLEAN, CORRUPTED = some_ids(9, seed=1), some_ids(9, seed=2)
PAIR = (318, 262)
LOGITS = Point("logits", units=PAIR)
LAST = len(CORRUPTED) - 1
ASKED = Capture(points=(LOGITS,), positions=frozenset([LAST]))


@pytest.fixture(scope="module")
def lens() -> Lens:
    return Lens(LIVELY)


def difference(record: StepRecord) -> float:
    a, b = record.points[LOGITS]
    return float(a - b)


async def patched(rig: Rig, clean: str, corrupted: str, name: str, position: int) -> float:
    """The logit difference at the end, with one activation of the clean session in the other."""
    point = parse_point(name, CONFIG)
    (there,) = (await rig.read(clean, name, positions=[position])).records
    edit = Edit(point=str(point), op="replace", value=value(there.points[point]))
    done = await rig.forked(
        corrupted,
        position,
        replay=True,
        interventions=(Intervention(edit=edit, spans=((position, position + 1),)),),
        capture=ASKED,
    )
    assert done.usage.steps == len(CORRUPTED) - position
    return difference(done.records[-1])


def assert_spread(grid: Tensor) -> None:
    """A grid of one number would show nothing."""
    assert grid.std() > 0.01


@in_loop
async def test_forks_give_the_grid_of_residuals(lens: Lens) -> None:
    expected = lens.patching_grid("resid_pre", CLEAN, CORRUPTED, PAIR)
    assert_spread(expected)
    async with running() as rig:
        clean, corrupted = await rig.open(CLEAN), await rig.open(CORRUPTED)
        grid = [
            [
                await patched(rig, clean, corrupted, f"blocks.{layer}.hook_resid_pre", position)
                for position in range(len(CLEAN))
            ]
            for layer in range(CONFIG.n_layer)
        ]
    assert_agrees(np.array(grid), expected)


@in_loop
async def test_forks_give_the_grid_of_heads_by_position(lens: Lens) -> None:
    expected = lens.patching_grid("attn_head_out_by_pos", CLEAN, CORRUPTED, PAIR)
    assert_spread(expected)
    async with running() as rig:
        clean, corrupted = await rig.open(CLEAN), await rig.open(CORRUPTED)
        grid = [
            [
                [
                    await patched(
                        rig, clean, corrupted, f"blocks.{layer}.attn.hook_z[{head}]", position
                    )
                    for head in range(CONFIG.n_head)
                ]
                for position in range(len(CLEAN))
            ]
            for layer in range(CONFIG.n_layer)
        ]
    assert_agrees(np.array(grid), expected)


GRIDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "resid_pre": ("blocks.*.hook_resid_pre", {"layer": "*", "position": "*"}),
    "attn_head_out_by_pos": (
        "blocks.*.attn.hook_z",
        {"layer": "*", "position": "*", "head": "*"},
    ),
}


@pytest.mark.parametrize("name", GRIDS)
@in_loop
async def test_sweep_gives_the_grid_and_both_baselines(
    name: str, lens: Lens, tmp_path: Path
) -> None:
    expected = lens.patching_grid(name, CLEAN, CORRUPTED, PAIR)
    save_lively(tmp_path, CONFIG)
    async with serving(model=str(tmp_path)) as server:
        told = await swept(server, *GRIDS[name])
    grid = np.array(told["points"][str(LOGITS)]["data"])
    assert_agrees(grid[..., 0] - grid[..., 1], expected)
    for part, ids in (("baseline", CORRUPTED), ("source", CLEAN)):
        theirs = lens.logits(ids)[-1, list(PAIR)]
        assert_agrees(told[part][str(LOGITS)]["data"], theirs, what=part)


async def swept(server: Serving, point: str, axes: Mapping[str, str]) -> Any:
    clean, corrupted = [await server.open(token_ids=ids) for ids in (CLEAN, CORRUPTED)]
    answer = await server.post(
        f"/v1/sessions/{corrupted}/sweep",
        axes=axes,
        intervention={"point": point, "op": "replace", "value": {"session": clean}},
        points=[str(LOGITS)],
        encoding_format="float",
    )
    assert answer.status_code == 200, answer.text
    return answer.json()

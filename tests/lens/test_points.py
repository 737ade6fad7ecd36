"""What fires in TransformerLens is our point of that name, however the step came about."""

from collections.abc import Sequence

import pytest

from engine.commands import Capture
from model.config import SIZES
from model.errors import UnknownPoint
from model.points import all_points, parse_points
from tests.engine.rig import CONFIG, LIVELY, in_loop, pieces, running, some_ids
from tests.engine.situations import CHUNK, SITUATIONS, Seen, assert_named
from tests.lens.oracle import Lens
from tests.lively import lively_checkpoint

pytestmark = pytest.mark.lens

GPT2 = SIZES["gpt2"]
NO_POINTS = {"embed.hook_in", "pos_embed.hook_in"}  # ids and positions
OURS_ALONE = {"embedding", "lens.0", "lens.1"}


@pytest.fixture(scope="module")
def lens() -> Lens:
    return Lens(LIVELY)


@pytest.fixture(scope="module")
def names(lens: Lens) -> Sequence[str]:
    return sorted(lens.activations([1]).keys() - NO_POINTS)


def test_all_that_fires_has_a_point_and_nearly_all_points_fire(names: Sequence[str]) -> None:
    points = parse_points(names, CONFIG).points
    assert {str(point) for point in all_points(CONFIG)} - {*map(str, points)} == OURS_ALONE
    for name in NO_POINTS:
        with pytest.raises(UnknownPoint, match="every record has"):
            parse_points([name], CONFIG)


@pytest.mark.parametrize("situation", SITUATIONS)
@in_loop
async def test_steps_have_what_fires(situation: str, lens: Lens, names: Sequence[str]) -> None:
    asked = Capture(points=parse_points(names, CONFIG).points)
    async with running(prefill_chunk=CHUNK) as rig:
        seen = await SITUATIONS[situation](rig, asked)
    expected = lens.activations(seen.history)
    assert seen.records
    for name in names:
        assert_named(seen, name, expected[name], CONFIG)


@in_loop
async def test_the_gpt2_shape_agrees() -> None:
    checkpoint = lively_checkpoint(GPT2)
    ids = some_ids(6)
    fired = Lens(checkpoint).activations(ids)
    names = sorted(fired.keys() - NO_POINTS)
    asked = Capture(points=parse_points(names, GPT2).points)
    room = pieces(8, GPT2)
    async with running(checkpoint=checkpoint, budget_bytes=room, max_sessions=4) as rig:
        session_id = await rig.open()
        first = await rig.appended(session_id, ids[:2], capture=asked)
        rest = await rig.appended(session_id, ids[2:], capture=asked)
    seen = Seen(ids, first.records + rest.records)
    assert len(seen.records) == len(ids)
    for name in names:
        assert_named(seen, name, fired[name], GPT2)

"""Many prompts to their activations, against one full pass of the reference for each."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from engine.studies.bulk import Bulk, Prompt, PromptActivations
from model.points import Point
from sessions.edits import Edit, Intervention
from tests.agreement import assert_agrees
from tests.engine.doubles import Gated
from tests.engine.rig import CONFIG, LIVELY, Rig, gate, happened, in_loop, running, some_ids
from tests.reference import reference_points

POINTS = tuple(
    sorted([Point("resid_post", 0), Point("z", 1, (1,)), Point("pattern", 1), Point("ln_f")])
)
PROMPTS = [some_ids(n, seed=n) for n in (3, 40, 1, 12, 7, 29)]


def prompt(ids: Sequence[int], *positions: int) -> Prompt:
    return Prompt(token_ids=tuple(ids), positions=positions or tuple(range(len(ids))))


async def all_of(
    rig: Rig, prompts: Sequence[Prompt], bulk: Bulk, **more: Any
) -> list[PromptActivations]:
    async with aclosing(bulk.run(rig.engine, prompts, CONFIG, **more)) as frames:
        return [one async for one in frames]


@pytest.mark.parametrize("window", [1, 3, 32])
@in_loop
async def test_each_prompt_in_order_as_the_reference_has_it(window: int) -> None:
    async with running(prefill_chunk=16) as rig:
        prompts = [prompt(ids) for ids in PROMPTS]
        got = await all_of(rig, prompts, Bulk(points=POINTS), window=window)
        assert [one.prompt for one in got] == prompts
        for ids, one in zip(PROMPTS, got, strict=True):
            assert_bundle(one, ids, range(len(ids)))
            assert one.usage.steps == len(ids)
        await rig.settled()
        assert not rig.places()


def assert_bundle(
    one: PromptActivations, ids: Sequence[int], positions: Sequence[int], **more: Any
) -> None:
    expected = reference_points(LIVELY, ids, **more)
    for point in POINTS:
        rows = np.stack([point.select(expected[str(point.whole)][p].numpy()) for p in positions])
        assert_agrees(one.arrays[point], rows[..., : one.arrays[point].shape[-1]], what=str(point))
    assert one.arrays[Point("pattern", 1)].shape[-1] == max(positions) + 1


@in_loop
async def test_chosen_positions_step_no_more_than_they_need() -> None:
    async with running() as rig:
        ids = some_ids(20)
        [one] = await all_of(rig, [prompt(ids, 2, 5)], Bulk(points=POINTS))
        assert_bundle(one, ids[:6], [2, 5])
        assert one.usage.steps == 6


@in_loop
async def test_interventions_are_of_every_prompt_and_reach_as_far_as_is_looked() -> None:
    twice = Edit(point="mlp_out.0", op="scale", scale=2.0)
    bulk = Bulk(points=POINTS, interventions=(Intervention(edit=twice, spans=((1, 2), (4, 5))),))
    async with running() as rig:
        prompts = [prompt(PROMPTS[1], 0, 3), prompt(PROMPTS[3])]
        short, whole = await all_of(rig, prompts, bulk)
        assert_bundle(short, PROMPTS[1][:4], [0, 3], edits={1: (twice,)})
        assert_bundle(whole, PROMPTS[3], range(12), edits={1: (twice,), 4: (twice,)})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@in_loop
async def test_means_are_those_of_the_rows(dtype: Any) -> None:
    points = (Point("resid_post", 0), Point("z", 1, (1,)))
    async with running(prefill_chunk=16) as rig:
        bulk = Bulk(points=points, mean=True, dtype=dtype)
        [one] = await all_of(rig, [prompt(PROMPTS[1], *range(3, 40, 2))], bulk)
        expected = reference_points(LIVELY, PROMPTS[1])
        for point in points:
            rows = point.select(expected[str(point.whole)][3:40:2].double().mean(0).numpy())
            assert one.arrays[point].dtype == dtype
            np.testing.assert_allclose(
                one.arrays[point], rows, rtol=1e-3, atol=1e-4 if dtype == np.float32 else 3e-3
            )


@in_loop
async def test_bytes_are_known_before_anything_is_stepped() -> None:
    async with running() as rig:
        for dtype, mean in ((np.float32, False), (np.float16, False), (np.float32, True)):
            points = POINTS if not mean else (Point("ln_f"), Point("z", 0))
            bulk = Bulk(points=points, mean=mean, dtype=dtype)
            one = prompt(PROMPTS[1], 0, 7, 39)
            [got] = await all_of(rig, [one], bulk)
            held = sum(array.nbytes for array in got.arrays.values())
            assert bulk.n_bytes(one, CONFIG) == (3 * held if mean else held)


@in_loop
async def test_what_nobody_takes_is_no_more_than_the_window() -> None:
    async with running() as rig:
        frames = Bulk(points=POINTS).run(
            rig.engine, [prompt(some_ids(3, seed=i)) for i in range(50)], CONFIG, window=4
        )
        first = await anext(frames)
        await rig.settled()
        n_stepped = sum(len(row) for rows in rig.model.passes for row in rows)
        assert n_stepped <= 4 * 3
        assert first.prompt.token_ids == tuple(some_ids(3, seed=0))
        await frames.aclose()
        assert rig.n_places() == 0


@in_loop
async def test_leaving_cancels_the_prompts_under_way() -> None:
    async with running(Gated) as rig:
        frames = Bulk(points=POINTS).run(rig.engine, [prompt(PROMPTS[1])] * 9, CONFIG)
        task = asyncio.create_task(anext(frames))
        await happened(gate(rig).arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate(rig).release()
        await rig.settled()
        assert len(rig.model.passes) <= 2
        assert not rig.places()

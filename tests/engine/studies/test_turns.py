"""Cells of several studies, and others, in one engine."""

import asyncio
from contextlib import aclosing
from functools import partial

import numpy as np

from engine.commands import Probe
from engine.errors import QueueFull
from engine.events import StepRecord
from engine.studies.flow import in_order
from engine.studies.turns import Turns
from tests.engine.editing import assert_looks_like, disguised
from tests.engine.rig import Rig, assert_refused, capture, in_loop, pieces, running, some_ids


async def cell(rig: Rig, session_id: str, n: int, position: int) -> StepRecord:
    """The first n tokens of a session with another one at a position; their last step."""
    probe = Probe(
        session_id=session_id,
        at=position,
        stop=n,
        interventions=(disguised(7, (position, position + 1)),),
        capture=capture(*rig.points("ln_f"), positions=frozenset({n - 1})),
        of_study=True,
    )
    async with rig.engine.probe(probe) as reply:
        return (await reply.result()).records[0]


async def study(rig: Rig, session_id: str) -> list[StepRecord]:
    n = rig.length(session_id)
    attempts = [partial(cell, rig, session_id, n, position) for position in range(n)]
    async with aclosing(in_order(attempts, rig.engine.turns)) as records:
        return [record async for record in records]


def assert_right(records: list[StepRecord], ids: list[int]) -> None:
    assert len(records) == len(ids)
    for position, record in enumerate(records):
        assert_looks_like([record], [*ids[:position], 7, *ids[position + 1 :]])


@in_loop
async def test_a_study_is_one_request_and_its_cells_refuse_nobody() -> None:
    async with running(max_queue=3) as rig:
        ids = some_ids(40)
        session_id = await rig.open(ids)
        studies = [asyncio.create_task(study(rig, session_id)) for _ in range(2)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert rig.engine.turns.n_studies == 2
        assert rig.engine.stats().waiting > 3
        reply = rig.append(session_id, [5])  # the third and last of the queue
        assert_refused(QueueFull, rig.engine.admission.check_queue)
        await reply.result()
        for records in await asyncio.gather(*studies):
            assert_right(records, ids)
        assert rig.engine.turns.n_studies == 0


@in_loop
async def test_studies_that_do_not_fit_beside_each_other_wait_for_each_other() -> None:
    async with running(budget_bytes=pieces(5)) as rig:
        ids = some_ids(24)
        session_id = await rig.open(ids)
        studies = [asyncio.create_task(study(rig, session_id)) for _ in range(6)]
        for records in await asyncio.gather(*studies):
            assert_right(records, ids)


@in_loop
async def test_no_more_cells_run_than_there_are_turns() -> None:
    turns, under_way, most = Turns(3), 0, 0

    async def run(result: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return result

    async def one() -> list[int]:
        attempts = [partial(run, n) for n in range(10)]
        async with aclosing(in_order(attempts, turns)) as results:
            return [result async for result in results]

    results = await asyncio.gather(one(), one(), one())
    assert np.array_equal(results, [range(10)] * 3)
    assert most == 3

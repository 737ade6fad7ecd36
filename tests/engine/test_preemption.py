"""More is being generated than there is room for: the youngest waits, and nobody notices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from engine.commands import Read
from engine.errors import NoRoom
from engine.reply import Reply
from model.points import Point
from tests.engine.doubles import Gated
from tests.engine.editing import assert_looks_like
from tests.engine.rig import (
    Rig,
    capture,
    ended,
    eventually,
    gate,
    happened,
    ids_of,
    in_loop,
    pieces,
    running,
    some_ids,
)

ASKED = capture(Point("embedding"), Point("ln_f"), Point("logits"), top_logprobs=2)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("asked", [capture(), ASKED])
@in_loop
async def test_all_generate_what_they_would_have_alone(atomic: bool, asked: object) -> None:
    async with running(budget_bytes=pieces(6), prefill_chunk=16) as rig:
        sessions = [await rig.open(some_ids(20, seed=i)) for i in range(4)]
        replies = [
            rig.generate(s, 60, atomic=atomic, ignore_eos=True, capture=asked) for s in sessions
        ]
        ends = await asyncio.gather(*map(ended, replies))
        assert rig.engine.stats().evictions["preempted"] > 0
        assert sum(done.usage.rebuilt_tokens for done in ends) > 0
    async with running() as rig:
        for i, done in enumerate(ends):
            assert [record.position for record in done.records] == list(range(20, 80))
            alone = await rig.generated(await rig.open(some_ids(20, seed=i)), 60, ignore_eos=True)
            assert ids_of(done.records) == ids_of(alone.records)
            history = some_ids(20, seed=i) + ids_of(done.records)
            if asked is ASKED:
                assert_looks_like(done.records, history)


@in_loop
async def test_the_oldest_never_waits() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        sessions = [await rig.open(some_ids(10, seed=i)) for i in range(4)]
        replies = [rig.generate(s, 100, ignore_eos=True) for s in sessions]
        ends = await asyncio.gather(*map(ended, replies))
        assert ends[0].usage.rebuilt_tokens == 0
        assert all(len(done.records) == 100 for done in ends)


@asynccontextmanager
async def one_waits() -> AsyncIterator[tuple[Rig, Reply, Reply]]:
    """Two generations of which only the older one has room, both at a closed gate."""
    async with running(partial(Gated, open_passes=2), budget_bytes=pieces(3)) as rig:
        a, b = await rig.open(some_ids(30)), await rig.open(some_ids(30, seed=1))
        old = rig.generate(a, 60, ignore_eos=True)
        young = rig.generate(b, 30, ignore_eos=True)
        await happened(gate(rig).arrived)
        gate(rig).let(6)  # both pass 32 and one has to wait
        await eventually(lambda: rig.engine.stats().evictions["preempted"] == 1)
        yield rig, old, young


@in_loop
async def test_a_newcomer_is_refused_while_somebody_waits() -> None:
    async with one_waits() as (rig, old, young):
        refused = asyncio.create_task(rig.open([1]))
        await asyncio.sleep(0)  # now it waits in the inbox
        gate(rig).let(3)
        with pytest.raises(NoRoom):
            await refused
        rig.model.release()
        assert len((await ended(old)).records) == 60
        assert len((await ended(young)).records) == 30
        assert await rig.open([1])


@in_loop
async def test_who_waits_can_leave() -> None:
    async with one_waits() as (rig, old, young):
        young.cancel()
        rig.model.release()
        assert len((await ended(old)).records) == 60
        await rig.settled()
        left = rig.engine.views(limit=1).views[0].session
        assert left.past_length == 30
        assert (await rig.appended(left.id, [1])).session.past_length == 31


@in_loop
async def test_the_waiting_ones_end_at_a_shutdown() -> None:
    async with one_waits() as (rig, old, young):
        drained = asyncio.create_task(rig.engine.drain(0.05))
        gate(rig).let(3)
        ends = await asyncio.gather(ended(old), ended(young), return_exceptions=True)
        assert [type(end).__name__ for end in ends] == ["Drained", "Drained"]
        await drained


@pytest.mark.parametrize("fresh", [True, False])
@in_loop
async def test_a_read_that_had_to_wait_tells_each_step_once(fresh: bool) -> None:
    async with running(budget_bytes=pieces(4), prefill_chunk=1) as rig:
        ids = some_ids(40)
        grows, looked_at = await rig.open(some_ids(30, seed=1)), await rig.open(ids)
        old = rig.generate(grows, 97, ignore_eos=True)
        seen = capture(*rig.points("pattern.0", "ln_f", "logits[5]"))
        command = Read(session_id=looked_at, capture=seen, fresh=fresh, atomic=False)
        done = await ended(rig.engine.read(command))
        assert [record.position for record in done.records] == list(range(40))
        assert_looks_like(done.records, ids)
        assert len((await ended(old)).records) == 97
        assert rig.engine.stats().evictions["preempted"] == 1

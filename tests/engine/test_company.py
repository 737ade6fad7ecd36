"""Sessions beside each other: nobody's ids depend on who else is served, and no update is lost."""

import asyncio
import contextlib
import random

import pytest

from engine.errors import Cancelled, NoRoom, SessionBusy, SessionDeleted
from engine.events import Done
from model.points import Point
from model.sampling import Sampling
from sessions.errors import SessionNotFound
from tests.agreement import assert_agrees
from tests.engine.rig import (
    LIVELY,
    Rig,
    capture,
    ended,
    ids_of,
    in_loop,
    pieces,
    running,
    some_ids,
)
from tests.reference import reference_points

HIDDEN = capture(Point("ln_f"))


async def told(rig: Rig, prompt: list[int], n: int, sampling: Sampling) -> list[int]:
    """The ids of one generation on a session of its own."""
    session_id = await rig.open(prompt)
    done = await rig.generated(session_id, n, sampling=sampling, ignore_eos=True)
    await rig.engine.delete(session_id)
    return ids_of(done.records)


@in_loop
async def test_x07_4_times_8_greedy_sessions_at_once_equal_their_solo_runs() -> None:
    prompts = [some_ids(3 + 7 * i, seed=i) for i in range(8)]
    greedy = Sampling(temperature=0)
    async with running(prefill_chunk=24) as rig:
        alone = [await told(rig, prompt, 24, greedy) for prompt in prompts]
        together = await asyncio.gather(*[told(rig, p, 24, greedy) for p in prompts * 4])
        assert together == alone * 4
        assert max(map(len, rig.model.passes)) > 16
        assert rig.n_places() == 0


@in_loop
async def test_b05_a_seed_gives_the_same_ids_alone_and_in_traffic() -> None:
    seeded = Sampling(temperature=1, seed=42)
    async with running() as rig:
        alone = await told(rig, [15496], 20, seeded)
        assert alone == await told(rig, [15496], 20, seeded)
        traffic = [
            told(rig, some_ids(9, seed=i), 30, Sampling(temperature=1, seed=1000 + i))
            for i in range(12)
        ]
        runs = [told(rig, [15496], 20, seeded) for _ in range(20)]
        answers = await asyncio.gather(*traffic, *runs)
        assert answers[12:] == [alone] * 20
        assert await told(rig, [15496], 20, Sampling(temperature=1, seed=43)) != alone


@in_loop
async def test_b05_one_generation_or_several_give_the_same_ids() -> None:
    """The noise is keyed by position, so where a request begins does not matter."""
    seeded = Sampling(temperature=1, seed=7)
    async with running() as rig:
        whole = await told(rig, [15496], 12, seeded)
        session_id = await rig.open([15496])
        parts = []
        for n in (1, 5, 6):
            done = await rig.generated(session_id, n, sampling=seeded, ignore_eos=True)
            parts += ids_of(done.records)
        assert parts == whole


@in_loop
async def test_x01_two_simultaneous_steps_are_one_step_and_one_busy_or_two_in_order() -> None:
    async def step(rig: Rig, session_id: str, token_id: int) -> Done | None:
        try:
            return await rig.appended(session_id, [token_id], capture=HIDDEN)
        except SessionBusy:
            return None

    async with running() as rig:
        for start in range(0, 100, 50):  # two sessions, as 100 rounds are too long for one
            session_id = await rig.open([1])
            records = []
            for _ in range(50):
                length = rig.length(session_id)
                both = await asyncio.gather(step(rig, session_id, 2), step(rig, session_id, 3))
                effects = [record for one in both if one for record in one.records]
                assert effects
                assert rig.length(session_id) == length + len(effects)
                records += sorted(effects, key=lambda record: record.position)
            history = [1, *ids_of(records)]
            assert list(rig.session(session_id).token_ids) == history, start
            expected = reference_points(LIVELY, history)["ln_f"]
            for record in records:
                assert_agrees(record.points[Point("ln_f")], expected[record.position])


@in_loop
async def test_any_traffic_at_once_ends_and_leaves_what_each_was_told() -> None:
    """20 clients that open, step, cancel and delete in a budget that is too small for them."""

    async def client(rig: Rig, seed: int) -> None:
        chance = random.Random(seed)
        session_id = await rig.open()
        history: list[int] = []
        for _ in range(8):
            try:
                n = chance.randint(1, 6)
                if not history or chance.random() < 0.5:
                    new = some_ids(n, seed=chance.randint(0, 99))
                    done = await ended(rig.append(session_id, new, atomic=chance.random() < 0.5))
                else:
                    reply = rig.generate(session_id, n, ignore_eos=True)
                    if chance.random() < 0.3:  # which may come too late
                        reply.cancel()
                    done = await reply.result()
                history += ids_of(done.records)
            except (Cancelled, NoRoom):
                await asyncio.sleep(0)
            assert list(rig.session(session_id).token_ids) == history
        if history:
            last = rig.append(session_id, [5], capture=HIDDEN)
            done = await last.result()
            expected = reference_points(LIVELY, [*history, 5])["ln_f"][-1]
            assert_agrees(done.records[0].points[Point("ln_f")], expected)
        await rig.engine.delete(session_id)

    async with running(budget_bytes=pieces(30), max_rows=5, prefill_chunk=7) as rig:
        await asyncio.gather(*[client(rig, seed) for seed in range(20)])
        assert (rig.n_places(), len(rig.engine.registry)) == (0, 0)


@in_loop
async def test_x02_deleting_at_any_moment_of_a_stream() -> None:
    async with running() as rig:
        for i in range(30):
            session_id = await rig.open(some_ids(5, seed=i))
            reply = rig.generate(session_id, 100, atomic=bool(i % 2), ignore_eos=True)
            for _ in range(i):
                await asyncio.sleep(0)
            await rig.engine.delete(session_id)
            with contextlib.suppress(SessionDeleted):  # it may have been at its end already
                await ended(reply)
            with pytest.raises(SessionNotFound):
                rig.engine.view(session_id)
            assert rig.n_places() == 0
        rig.check()

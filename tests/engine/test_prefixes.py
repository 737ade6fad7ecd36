"""Prompts that begin as another of the same owner did are not computed again."""

import asyncio
from functools import partial

import numpy as np
import pytest

from engine.commands import Truncate
from engine.events import Done
from engine.limits import FOUND_TOKENS
from model.points import Point
from tests.agreement import assert_agrees
from tests.engine.doubles import Counting, Failing, steps_token
from tests.engine.rig import (
    LIVELY,
    LONG,
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

PROMPT = some_ids(70)
LOOKED_UP = capture(Point("wte"), Point("wpe"), Point("embedding"), Point("resid_pre", 0))


async def appended_to_new(rig: Rig, token_ids: list[int], **more: object) -> Done:
    owner = str(more.pop("owner", ""))
    session_id = await rig.open(owner=owner)
    return await rig.appended(session_id, token_ids, owner=owner, **more)


@in_loop
async def test_whole_pieces_of_a_known_prompt_are_found() -> None:
    async with running() as rig:
        assert (await appended_to_new(rig, PROMPT)).usage.cached_tokens == 0
        done = await appended_to_new(rig, [*PROMPT, 5], capture=LOOKED_UP)
        assert (done.usage.cached_tokens, done.usage.steps) == (64, 71)
        assert rig.model.passes[1:] == [[range(64, 71)]]
        assert rig.cache.usage().bytes_shared == pieces(2)
        expected = reference_points(LIVELY, [*PROMPT, 5])
        assert [record.position for record in done.records] == list(range(71))
        for record in done.records:
            for point in LOOKED_UP.points:
                right = expected[str(point)][record.position]
                assert np.array_equal(record.points[point], right)


@in_loop
async def test_p15_a_prompt_that_is_found_whole_has_its_logits() -> None:
    async with running() as rig:
        first, second = await rig.open(), await rig.open()
        prompt = PROMPT[:64]
        await rig.appended(first, prompt)
        done = await rig.appended(second, prompt)
        assert (done.usage.cached_tokens, len(rig.model.passes)) == (64, 1)
        ids = [
            ids_of((await rig.generated(s, 8, ignore_eos=True)).records) for s in (first, second)
        ]
        assert ids[0] == ids[1]
        expected = reference_points(LIVELY, prompt)["logits"][-1]
        assert ids[0][0] == int(expected.argmax())


@in_loop
async def test_another_chain_or_another_owner_finds_nothing() -> None:
    async with running() as rig:
        await appended_to_new(rig, PROMPT)
        other = [PROMPT[0] ^ 1, *PROMPT[1:]]
        assert (await appended_to_new(rig, other)).usage.cached_tokens == 0
        assert (await appended_to_new(rig, PROMPT, owner="b")).usage.cached_tokens == 0
        assert (await appended_to_new(rig, PROMPT, owner="b")).usage.cached_tokens == 64
        moved = [1, *PROMPT]  # the same ids at other positions
        assert (await appended_to_new(rig, moved)).usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        (capture(top_logprobs=0), 0),
        (capture(Point("ln_f")), 0),
        (capture(Point("embedding"), Point("logits")), 0),
        (capture(Point("ln_f"), positions=frozenset({40})), 32),
        (capture(Point("ln_f"), positions=frozenset({69})), 64),
    ],
)
@in_loop
async def test_what_must_be_computed_is_computed(asked: object, cached: int) -> None:
    async with running() as rig:
        cold = await appended_to_new(rig, PROMPT, capture=asked)
        warm = await appended_to_new(rig, PROMPT, capture=asked)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, cached)
        for a, b in zip(cold.records, warm.records, strict=True):
            assert (a.token_id, a.points.keys()) == (b.token_id, b.points.keys())
            assert (a.logprob is None) == (b.logprob is None)
            for point, row in a.points.items():
                assert_agrees(b.points[point], row, what=str(point))


@in_loop
async def test_a_dropped_session_is_found_again_until_its_room_is_needed() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        session_id = await rig.open(PROMPT)
        await rig.engine.delete(session_id)
        usage = rig.cache.usage()
        assert (usage.bytes_used, usage.bytes_cached) == (0, pieces(2))
        assert (await appended_to_new(rig, PROMPT)).usage.cached_tokens == 64
        for page in rig.engine.views(limit=10).views:
            await rig.engine.delete(page.session.id)
        await rig.open(some_ids(128, seed=1))  # the whole budget
        assert rig.engine.stats().evictions["prefix"] == 2
        assert (await appended_to_new(rig, PROMPT)).usage.cached_tokens == 0


@in_loop
async def test_what_an_eviction_left_is_not_rebuilt() -> None:
    async with running(budget_bytes=pieces(6)) as rig:
        session_id = await rig.open(PROMPT)
        await rig.open(some_ids(128, seed=1))
        assert rig.engine.view(session_id).kv == "evicted"
        await rig.engine.delete(rig.engine.views(limit=1).views[0].session.id)
        done = await rig.appended(session_id, [3], capture=capture(Point("ln_f")))
        assert (done.usage.rebuilt_tokens, done.usage.cached_tokens) == (6, 0)
        row = done.records[0].points[Point("ln_f")]
        assert_agrees(row, reference_points(LIVELY, [*PROMPT, 3])["ln_f"][-1], what="ln_f")


@in_loop
async def test_a_request_that_failed_leaves_nothing_to_be_found() -> None:
    async with running(partial(Failing, when=steps_token(666))) as rig:
        session_id = await rig.open()
        with pytest.raises(Exception, match="step failed"):
            await rig.appended(session_id, [*PROMPT, 666], atomic=True)
        await rig.settled()
        assert rig.cache.usage().bytes_cached == 0
        assert (await rig.appended(session_id, PROMPT)).usage.cached_tokens == 0


@pytest.mark.parametrize("buffer", [1, 4000, 1 << 20])
@in_loop
async def test_a_slow_reader_is_not_flooded_with_what_was_found(buffer: int) -> None:
    async with running(reply_buffer_bytes=buffer) as rig:
        await appended_to_new(rig, PROMPT)
        session_id = await rig.open()
        reply = rig.append(session_id, PROMPT, atomic=False, capture=LOOKED_UP)
        backlogs = []
        positions = []
        async for event in reply:
            backlogs.append(reply.backlog_bytes)
            positions += [record.position for record in getattr(event, "records", ())]
        assert positions == list(range(70))
        assert max(backlogs) <= max(buffer, 900 * 2)


@in_loop
async def test_truncated_into_a_known_piece_and_gone_another_way() -> None:
    async with running() as rig:
        first, second = await rig.open(PROMPT), await rig.open(PROMPT)
        await rig.engine.truncate(Truncate(session_id=first, to=40))
        await rig.appended(first, some_ids(40, seed=5))
        history = PROMPT[:40] + some_ids(40, seed=5)
        for session_id, ids in ((first, history), (second, list(PROMPT))):
            done = await rig.appended(session_id, [9], capture=capture(Point("ln_f")))
            row = done.records[0].points[Point("ln_f")]
            assert_agrees(row, reference_points(LIVELY, [*ids, 9])["ln_f"][-1], what="ln_f")


@in_loop
async def test_many_found_prompts_hold_up_nobody_for_long() -> None:
    """What is found costs no step but a record for each token: an iteration takes some."""
    observer = Counting()
    async with running(checkpoint=LONG, observer=observer) as rig:
        prompt = some_ids(960)
        await rig.open(prompt)
        sessions = [await rig.open() for _ in range(6)]
        before = len(observer.tokens)
        replies = [rig.append(s, prompt) for s in sessions]
        ends = await asyncio.gather(*map(ended, replies))
        assert [done.usage.cached_tokens for done in ends] == [960] * 6
        assert len(observer.tokens) - before >= 6 * 960 / FOUND_TOKENS
        assert not any(n for _, n in observer.tokens[before:])  # none of it was stepped


@in_loop
async def test_what_others_may_begin_with_outlives_a_step_back() -> None:
    """Truncated into the first piece of a known conversation and gone another way."""
    async with running() as rig:
        await rig.engine.delete(await rig.open(some_ids(128)))
        session_id = await rig.open(some_ids(32))
        await rig.engine.truncate(Truncate(session_id=session_id, to=31))
        await rig.appended(session_id, [5])
        assert (await appended_to_new(rig, some_ids(128))).usage.cached_tokens == 128

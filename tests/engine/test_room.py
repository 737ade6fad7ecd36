"""The K/V budget: who gets room, who loses it, and that results do not tell."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from cache.accounting import KV, PIECE
from cache.kv import KVCache
from engine.commands import Truncate
from engine.errors import Cancelled, NoRoom
from engine.events import Failed
from engine.places import Places
from model.gpt2 import cache_shape
from model.points import Point
from sessions.session import Session
from tests.agreement import assert_agrees
from tests.engine.doubles import Gated
from tests.engine.rig import (
    CONFIG,
    LIVELY,
    Rig,
    capture,
    ended,
    gate,
    happened,
    ids_of,
    in_loop,
    pieces,
    running,
    some_ids,
)
from tests.engine.test_streams import last
from tests.reference import reference_points

ALL = capture(Point("wte"), Point("embedding"), Point("ln_f"), Point("logits"), top_logprobs=3)


def kv(rig: Rig, session_id: str) -> str:
    return rig.engine.view(session_id).kv


@in_loop
async def test_the_session_used_longest_ago_is_evicted_and_rebuilt_when_touched() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        a = await rig.open(some_ids(40, seed=1))
        b = await rig.open(some_ids(40, seed=2))
        assert rig.cache.usage().bytes_used == pieces(4)
        await rig.appended(a, [7])  # a is in use after b
        c = await rig.open(some_ids(40, seed=3))
        assert [kv(rig, s) for s in (a, b, c)] == ["resident", "evicted", "resident"]
        assert rig.engine.stats().evictions == {"room": 1, "preempted": 0, "prefix": 1}
        assert rig.cache.usage().bytes_used == pieces(4)
        assert rig.length(b) == 40  # the ids are kept
        rig.check()
        done = await rig.appended(b, some_ids(3, seed=4), capture=ALL)
        assert (done.usage.steps, done.usage.rebuilt_tokens) == (3, 40)
        assert [kv(rig, s) for s in (a, b, c)] == ["evicted", "resident", "resident"]
        history = some_ids(40, seed=2) + some_ids(3, seed=4)
        expected = reference_points(LIVELY, history)
        assert [record.position for record in done.records] == [40, 41, 42]
        for record in done.records:
            for point, row in record.points.items():
                assert_agrees(row, expected[str(point)][record.position], what=str(point))
            scores = expected["logits"][record.position - 1].log_softmax(-1)
            assert record.logprob == pytest.approx(float(scores[record.token_id]), abs=1e-3)


@pytest.mark.parametrize("atomic", [True, False])
@in_loop
async def test_an_evicted_session_generates_what_it_would_have(atomic: bool) -> None:
    prompt = some_ids(70)
    async with running(budget_bytes=pieces(4), prefill_chunk=16) as rig:
        session_id = await rig.open(prompt)
        await rig.open(some_ids(60, seed=1))
        assert kv(rig, session_id) == "evicted"
        # Points, too: a rebuilt position has no record, whatever the request asks for.
        reply = rig.generate(session_id, 20, atomic=atomic, ignore_eos=True, capture=ALL)
        records = (await ended(reply)).records
        assert [record.position for record in records] == list(range(70, 90))
        assert rig.model.passes[-20:] == [[range(p, p + 1)] for p in range(70, 90)]
        solo = await rig.generated(await rig.open(prompt), 20, ignore_eos=True)
        assert ids_of(records) == ids_of(solo.records)


@in_loop
async def test_truncating_an_evicted_session_rebuilds_only_what_is_left() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        session_id = await rig.open(some_ids(70))
        await rig.open(some_ids(60, seed=1))
        view = await rig.engine.truncate(Truncate(session_id=session_id, to=9))
        assert (view.kv, view.session.past_length) == ("evicted", 9)
        assert (await rig.appended(session_id, [1])).usage.rebuilt_tokens == 9


@in_loop
async def test_m01_who_finds_no_room_is_told_before_a_step_and_nothing_waits() -> None:
    few = partial(Gated, open_passes=7)
    async with running(few, budget_bytes=pieces(4), prefill_chunk=16) as rig:
        a, b = await rig.open(some_ids(70)), await rig.open(some_ids(30, seed=1))
        busy = rig.append(a, some_ids(40, seed=2))  # the whole budget
        await happened(gate(rig).arrived)
        refused = rig.append(b, [1])
        gate(rig).let(1)
        with pytest.raises(NoRoom) as error:
            await refused.started()
        assert error.value.total_bytes == pieces(4)
        assert rig.length(b) == 30
        assert not rig.engine.registry.is_busy(b)
        opening = asyncio.create_task(rig.open([5]))
        await asyncio.sleep(0)  # now it waits in the inbox
        gate(rig).let(1)
        with pytest.raises(NoRoom):
            await opening
        assert len(rig.engine.registry) == 2
        busy.cancel()
        rig.model.release()
        _, event = await last(busy)
        assert isinstance(event, Failed)
        assert isinstance(event.error, Cancelled)
        assert (await rig.appended(b, [1])).session.past_length == 31


@in_loop
async def test_what_can_never_fit_is_refused_and_evicts_nobody() -> None:
    async with running(budget_bytes=pieces(2)) as rig:
        session_id = await rig.open(some_ids(20))
        with pytest.raises(NoRoom):
            await rig.open(some_ids(65))
        assert kv(rig, session_id) == "resident"
        assert not any(rig.engine.stats().evictions.values())
        await rig.appended(session_id, some_ids(44))
        with pytest.raises(NoRoom):
            await rig.appended(session_id, [1])
        assert rig.length(session_id) == 64


@in_loop
async def test_m01_all_sessions_at_once_with_room_for_some() -> None:
    """Each ends: with its tokens, or with no room and as it was. Afterwards each works again."""
    async with running(budget_bytes=pieces(3), prefill_chunk=8) as rig:
        sessions = [await rig.open(some_ids(30, seed=i)) for i in range(8)]
        replies = [rig.append(s, some_ids(2, seed=9)) for s in sessions]
        ends = await asyncio.gather(*[r.result() for r in replies], return_exceptions=True)
        for session_id, end in zip(sessions, ends, strict=True):
            assert rig.length(session_id) == (30 if isinstance(end, NoRoom) else 32)
            assert isinstance(end, NoRoom) or not isinstance(end, BaseException)
        assert any(not isinstance(end, BaseException) for end in ends)
        for i, session_id in enumerate(sessions):
            ids = list(rig.session(session_id).token_ids)
            done = await rig.appended(session_id, [15496], capture=capture(Point("ln_f")))
            row = done.records[0].points[Point("ln_f")]
            assert_agrees(row, reference_points(LIVELY, [*ids, 15496])["ln_f"][-1], what=str(i))


@in_loop
async def test_room_that_was_reserved_and_not_used_goes_back_at_the_end() -> None:
    async with running(budget_bytes=pieces(4)) as rig:
        session_id = await rig.open([15496])
        first = await rig.generated(session_id, 1)
        stop = frozenset({first.records[0].token_id})
        await rig.engine.truncate(Truncate(session_id=session_id, to=1))
        done = await rig.generated(session_id, stop_token_ids=stop)
        assert [r.finish_reason for r in done.records] == ["stop"]
        assert rig.cache.usage().bytes_used == pieces(1)


@in_loop
async def test_a_slot_is_as_scarce_as_a_piece() -> None:
    async with running(max_sessions=8, budget_bytes=pieces(3)) as rig:
        sessions = [await rig.open([i]) for i in range(5)]
        assert [kv(rig, s) for s in sessions] == ["evicted"] * 2 + ["resident"] * 3
        empty = await rig.open()  # holds nothing, takes nothing from anybody
        assert kv(rig, empty) == "resident"
        assert rig.engine.stats().evictions["room"] == 2


def session(name: str, token_ids: Sequence[int] = ()) -> Session:
    return Session(id=name, created=0, ttl_seconds=1, token_ids=tuple(token_ids))


def take(places: Places, name: str, *, length: int, kept: int = 0) -> KV:
    return places.take(session(name, [0] * kept), step_keys=(), reusable=0, length=length)


def test_places_evict_the_fewest_and_never_who_is_at_work() -> None:
    cache = KVCache(cache_shape(CONFIG, "float32"), budget_bytes=pieces(6), max_slots=4)
    at_work = {"a"}
    places = Places(cache, lambda: at_work)
    for name, length in (("a", 64), ("b", 32), ("c", 32), ("d", 64)):
        kv = take(places, name, length=length)
        kv.stage(1)
        kv.advance(1)
    take(places, "e", length=60)  # two pieces and a place: b and c, though d alone would do
    assert list(places._places) == ["a", "d", "e"]
    places.check()
    at_work |= {"d", "e"}
    with pytest.raises(NoRoom):
        take(places, "f", length=1)
    assert list(places._places) == ["a", "d", "e"]
    places.trim("d", 0)
    take(places, "f", length=64)
    assert (places.evicted["room"], cache.usage().bytes_used) == (2, pieces(6))
    places.forget("unknown")
    places.check()


def test_a_place_taken_again_keeps_only_what_the_session_has() -> None:
    """As when the log lost a commit whose rows are in the cache."""
    cache = KVCache(cache_shape(CONFIG, "float32"), budget_bytes=pieces(6), max_slots=4)
    places = Places(cache, set)
    place = take(places, "a", length=50)
    slot = place.slots[0]
    place.stage(50)
    cache.buffers.ln_f[slot, :50] = 1
    place.advance(50)
    assert take(places, "a", kept=20, length=40) is place
    assert (place.length, place.reserved) == (20, 64)
    assert np.count_nonzero(cache.buffers.ln_f[slot, :, 0].numpy()) == PIECE  # no whole piece more
    assert take(places, "a", kept=99, length=99).length == 20  # the rest is rebuilt

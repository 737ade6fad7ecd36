"""Edited steps: what they show, and what becomes of them in history, branches and the cache."""

import numpy as np
import pytest

from engine.commands import Fork, Truncate
from engine.errors import EditNotFinite, EditOutOfReach, PositionCommitted, TooManyEdits
from engine.events import Done
from model.points import Point
from sessions.edits import STEP_BYTES, Edit, Intervention
from sessions.log import MemoryLog
from tests.engine.editing import assert_looks_like, disguise, disguised, value
from tests.engine.rig import (
    CONFIG,
    LIVELY,
    Rig,
    assert_refused,
    capture,
    ended,
    ids_of,
    in_loop,
    running,
    some_ids,
)
from tests.reference import reference_points

SEEN = capture(Point("wte"), Point("resid_post", 1), Point("ln_f"), Point("logits"))
A, B, C = 11, 3290, 50000


def changed(history: list[int], **by_position: int) -> list[int]:
    """`history` as edits make it look: `p7=11` puts token 11 at position 7."""
    seen = list(history)
    for name, token_id in by_position.items():
        seen[int(name[1:])] = token_id
    return seen


async def assert_goes_on(rig: Rig, session_id: str, looks: list[int]) -> None:
    """Unedited steps that follow see a history that looks so."""
    new = some_ids(3, seed=8)
    done = await rig.appended(session_id, new, capture=SEEN)
    assert_looks_like(done.records, looks + new)


@in_loop
async def test_an_edited_step_looks_so_to_all_later_ones_and_says_what_was_edited() -> None:
    async with running() as rig:
        ids = some_ids(6)
        session_id = await rig.open()
        done = await rig.appended(
            session_id, ids, capture=SEEN, interventions=(disguised(A, (2, 4)),)
        )
        looks = changed(ids, p2=A, p3=A)
        assert ids_of(done.records) == ids
        assert_looks_like(done.records, looks)
        edited = [record.position for record in done.records if record.edits]
        assert edited == [2, 3] == list(rig.session(session_id).edits)
        assert done.records[2].edits == (disguise(A),)
        await assert_goes_on(rig, session_id, looks)


@in_loop
async def test_chunks_and_streams_are_edited_as_one_pass_is() -> None:
    async with running(prefill_chunk=3) as rig:
        ids = some_ids(20)
        session_id = await rig.open(ids[:5])
        done = await rig.appended(
            session_id,
            ids[5:],
            atomic=False,
            capture=SEEN,
            interventions=(disguised(A, (7, 8)), disguised(B, (12, None))),
        )
        looks = [*changed(ids, p7=A)[:12], *[B] * 8]
        assert_looks_like(done.records, looks)
        assert list(rig.session(session_id).edits) == [7, *range(12, 20)]


@in_loop
async def test_open_slices_reach_generated_tokens() -> None:
    async with running() as rig:
        prompt = some_ids(4)
        session_id = await rig.open(prompt)
        done = await rig.generated(
            session_id, 6, ignore_eos=True, capture=SEEN, interventions=(disguised(A, (5, None)),)
        )
        ids = ids_of(done.records)
        looks = [*prompt, ids[0], A, A, A, A, A]
        assert_looks_like(done.records, looks)
        logits = reference_points(LIVELY, looks)["logits"]
        assert ids == logits[3:9].argmax(-1).tolist()
        assert len(rig.session(session_id).edits) == 5


@in_loop
async def test_an_edited_history_that_is_evicted_is_rebuilt_with_its_edits() -> None:
    async with running(max_sessions=4) as rig:
        ids = some_ids(40)
        session_id = await rig.open()
        await rig.appended(session_id, ids, interventions=(disguised(A, (33, 35)),))
        rig.engine._thread.places.evict(session_id, "room")
        looks = changed(ids, p33=A, p34=A)
        done = await rig.appended(session_id, [5], capture=SEEN)
        assert done.usage.rebuilt_tokens > 0
        assert_looks_like(done.records, [*looks, 5])
        await assert_goes_on(rig, session_id, [*looks, 5])


@in_loop
async def test_truncated_edits_are_forgotten() -> None:
    async with running() as rig:
        ids = some_ids(40)
        session_id = await rig.open(ids[:30])
        await rig.appended(session_id, ids[30:], interventions=(disguised(A),))
        await rig.engine.truncate(Truncate(session_id=session_id, to=32))
        assert list(rig.session(session_id).edits) == [30, 31]
        await rig.engine.truncate(Truncate(session_id=session_id, to=30))
        assert not rig.session(session_id).edits
        done = await rig.appended(session_id, ids[30:], capture=SEEN)
        assert_looks_like(done.records, ids)


@in_loop
async def test_an_edited_prefix_never_serves_a_plain_one_nor_the_other_way_round() -> None:
    async with running() as rig:
        ids = some_ids(70)
        for interventions, looks in [
            ((disguised(A, (3, 4)),), changed(ids, p3=A)),
            ((), ids),
            ((disguised(B, (3, 4)),), changed(ids, p3=B)),
            ((disguised(A, (40, 41)),), changed(ids, p40=A)),
            ((disguised(A, (3, 4)),), changed(ids, p3=A)),
        ]:
            session_id = await rig.open()
            done = await rig.appended(session_id, ids, interventions=interventions)
            await assert_goes_on(rig, session_id, looks)
        assert done.usage.cached_tokens == 64  # the same edits again are found
        assert rig.engine.stats().kv.bytes_shared > 0


@in_loop
async def test_found_rows_are_not_shown_where_edits_make_them_differ() -> None:
    async with running() as rig:
        ids = some_ids(64)
        edits = (disguised(A, (3, 4)),)
        for _ in range(2):
            session_id = await rig.open()
            done = await rig.appended(
                session_id, ids, capture=capture(Point("wte")), interventions=edits
            )
            assert_looks_like(done.records, changed(ids, p3=A))


@pytest.mark.parametrize("at", [10, 33, 34, 40])
@in_loop
async def test_a_fork_inherits_the_edits_before_it(at: int) -> None:
    async with running() as rig:
        ids = some_ids(40)
        parent = await rig.open()
        await rig.appended(parent, ids, interventions=(disguised(A, (33, 35)),))
        child = await rig.fork(parent, at)
        assert list(rig.session(child).edits) == [p for p in (33, 34) if p < at]
        await assert_goes_on(rig, child, changed(ids, p33=A, p34=A)[:at])
        await assert_goes_on(rig, parent, changed(ids, p33=A, p34=A))


@pytest.mark.parametrize("keep", [True, False])
@in_loop
async def test_a_replayed_tail_with_and_without_its_old_edits(keep: bool) -> None:
    async with running() as rig:
        ids = some_ids(12)
        parent = await rig.open()
        await rig.appended(parent, ids, interventions=(disguised(A, (3, 4)), disguised(B, (8, 9))))
        done = await rig.forked(
            parent,
            6,
            [C],
            replay=True,
            keep_edits=keep,
            capture=SEEN,
            interventions=(disguised(C, (10, 11)),),
        )
        looks = changed([*ids, C], p3=A, p10=C, **({"p8": B} if keep else {}))
        assert ids_of(done.records) == [*ids[6:], C]
        assert [record.position for record in done.records] == list(range(6, 13))
        assert_looks_like(done.records, looks)
        child = rig.session(done.session.id)
        assert list(child.edits) == ([3, 8, 10] if keep else [3, 10])
        await assert_goes_on(rig, child.id, looks)
        await assert_goes_on(rig, parent, changed(ids, p3=A, p8=B))


@in_loop
async def test_new_edits_of_a_step_follow_those_it_had() -> None:
    async with running() as rig:
        parent = await rig.open()
        await rig.appended(parent, [1, 2], interventions=(disguised(A, (1, 2)),))
        done = await rig.forked(
            parent, 0, replay=True, interventions=(disguised(B, (1, 2)),), capture=SEEN
        )
        assert done.records[1].edits == (disguise(A), disguise(B))
        assert_looks_like(done.records, [1, B])


@in_loop
async def test_edits_of_one_row_leave_its_mates_alone() -> None:
    async with running() as rig:
        prompts = [some_ids(9, seed=seed) for seed in range(4)]
        sessions = [await rig.open() for _ in prompts]
        replies = [
            rig.append(
                session_id, ids, capture=SEEN, interventions=(disguised(A, (4, 5)),) if odd else ()
            )
            for session_id, ids, odd in zip(sessions, prompts, [0, 1, 0, 1], strict=True)
        ]
        dones = [await ended(reply) for reply in replies]
        for ids, done, odd in zip(prompts, dones, [0, 1, 0, 1], strict=True):
            assert_looks_like(done.records, changed(ids, p4=A) if odd else ids)


@in_loop
async def test_positions_that_are_committed_or_never_stepped_are_refused() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(5))

        def append(*spans: tuple[int, int | None]) -> object:
            return rig.append(session_id, [1, 2], interventions=(disguised(A, *spans),))

        (refusal, *_) = assert_refused(
            PositionCommitted,
            lambda: append((4, 6)),
            lambda: append((0, None)),
            lambda: append((5, 6), (2, 3)),
            lambda: rig.generate(session_id, 3, interventions=(disguised(A, (4, None)),)),
            lambda: rig.engine.fork(
                Fork(
                    session_id=session_id,
                    at=3,
                    replay=True,
                    interventions=(disguised(A, (2, 3)),),
                )
            ),
        )
        assert (refusal.position, refusal.past_length) == (4, 5)
        assert "fork" in str(refusal)
        assert "replay" in str(refusal)
        assert_refused(
            EditOutOfReach,
            lambda: append((7, None)),
            lambda: append((5, 8)),
            lambda: rig.generate(session_id, 3, interventions=(disguised(A, (6, 9)),)),
            lambda: rig.engine.fork(
                Fork(session_id=session_id, interventions=(disguised(A, (5, 6)),))
            ),
        )
        assert rig.length(session_id) == 5
        await assert_goes_on(rig, session_id, some_ids(5))


@in_loop
async def test_edits_in_memory_are_bounded_and_counted_once() -> None:
    edits, others = (disguised(A),), (disguised(B),)
    limit = disguise(A).n_bytes + 5 * STEP_BYTES
    async with running(edit_bytes=limit) as rig:
        session_id = await rig.open()
        await rig.appended(session_id, [1, 2, 3], interventions=edits)
        refusals = assert_refused(
            TooManyEdits,
            lambda: rig.append(session_id, [1, 2, 3], interventions=edits),
            lambda: rig.append(session_id, [1], interventions=others),
        )
        told = (refusals[0].n_bytes, refusals[0].max_bytes)
        assert told == (limit + STEP_BYTES, limit)
        await rig.probe(token_ids=(1, 2, 3), interventions=others, capture=SEEN)  # is not kept
        first = rig.append(session_id, [1, 2], interventions=edits)
        assert_refused(  # what is under way counts
            TooManyEdits,
            lambda: rig.engine.fork(
                Fork(session_id=session_id, token_ids=(1, 2), interventions=edits)
            ),
        )
        await ended(first)
        await rig.engine.delete(session_id)
        await rig.appended(await rig.open(), [1] * 5, interventions=edits)


@in_loop
async def test_values_that_overflow_fail_their_own_row_and_say_so() -> None:
    huge = value(np.full(CONFIG.n_embd, 3e38, np.float32))
    edit = Edit(point="resid_post.0", op="replace", value=huge)
    async with running() as rig:
        session_id, mate = await rig.open([1, 2]), await rig.open([3])
        bad = rig.append(session_id, [4, 5], interventions=(Intervention(edit=edit),))
        good = rig.append(mate, [6], capture=SEEN)
        with pytest.raises(EditNotFinite):
            await ended(bad)
        assert_looks_like((await ended(good)).records, [3, 6])
        assert not rig.session(session_id).edits
        await assert_goes_on(rig, session_id, [1, 2])


@in_loop
async def test_later_steps_that_edits_make_overflow_say_so_too() -> None:
    """A value that its own step does not look at."""
    huge = value(np.full((CONFIG.n_head, CONFIG.d_head), 1e25, np.float32))
    edits = (
        Intervention(edit=Edit(point="v.0", op="replace", value=huge)),
        Intervention(edit=Edit(point="z.0", op="scale", scale=0.0)),
    )
    async with running() as rig:
        session_id = await rig.open([1, 2])
        await rig.appended(session_id, [3], interventions=edits)
        with pytest.raises(EditNotFinite):
            await rig.appended(session_id, [4])
        assert rig.length(session_id) == 3


@in_loop
async def test_the_log_keeps_edits_with_their_steps() -> None:
    log = MemoryLog()
    async with running(log=log) as rig:
        session_id = await rig.open([1])
        edits = (disguised(A, (2, 3)),)
        await rig.appended(session_id, [2, 3], interventions=edits)
        await rig.appended(session_id, [4, 5], atomic=False, interventions=(disguised(B, (3, 4)),))
        child = await rig.fork(session_id, 3)
        kept = {session.id: session for session in log.load()}
        assert kept[session_id].edits == {2: (disguise(A),), 3: (disguise(B),)}
        assert kept[session_id] == rig.session(session_id)
        assert kept[child].edits == {2: (disguise(A),)}


async def edited_twice(rig: Rig) -> tuple[Done, Done]:
    """The same edited append of two sessions."""
    first, second = await rig.open(), await rig.open()
    ids, edits = some_ids(40), (disguised(A, (7, 9)),)
    return (
        await rig.appended(first, ids, interventions=edits, capture=SEEN),
        await rig.appended(second, ids, interventions=edits, capture=SEEN),
    )


@in_loop
async def test_what_is_asked_for_is_computed_though_the_same_edits_are_cached() -> None:
    async with running() as rig:
        first, second = await edited_twice(rig)
        assert second.usage.cached_tokens == 0
        assert_looks_like(second.records, changed(some_ids(40), p7=A, p8=A))
        assert [r.edits for r in first.records] == [r.edits for r in second.records]

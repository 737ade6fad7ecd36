"""What a record says: positions, text, points, logprobs."""

from collections.abc import Sequence
from functools import partial

import pytest

from embedding.tokenizer import END_OF_TEXT
from engine.events import Done, StepRecord
from model.points import Point, all_points
from model.sampling import Sampling
from tests.engine.doubles import ScriptedLogits
from tests.engine.editing import assert_looks_like
from tests.engine.rig import (
    CONFIG,
    LIVELY,
    TOKENIZER,
    capture,
    ended,
    ids_of,
    in_loop,
    running,
    some_ids,
)
from tests.reference import reference_points

EVERYTHING = all_points(CONFIG)
SCRIPT_START = 3


def text_of(records: Sequence[StepRecord]) -> str:
    return "".join(record.text for record in records)


def assert_scored(records: Sequence[StepRecord], history: Sequence[int], top: int) -> None:
    """Every logprob is the reference's, from the row before the record's own token."""
    logits = reference_points(LIVELY, history)["logits"]
    for record in records:
        assert record.token_id == history[record.position]
        if record.position == 0:
            assert (record.logprob, record.top_logprobs) == (None, None)
            continue
        row = logits[record.position - 1].double().log_softmax(-1).numpy()
        assert record.logprob == pytest.approx(row[record.token_id], abs=1e-3)
        assert record.top_logprobs is not None
        assert len(record.top_logprobs) == top
        for one in record.top_logprobs:
            assert one.logprob == pytest.approx(row[one.token_id], abs=1e-3)
        told = [(-one.logprob, one.token_id) for one in record.top_logprobs]
        assert told == sorted(told)
        if top:
            assert record.top_logprobs[0].logprob == pytest.approx(row.max(), abs=1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("atomic", [True, False])
@in_loop
async def test_an_appends_records_in_any_chunks(chunk: int, atomic: bool) -> None:
    """All points, logits among them, and logprobs over the chunks' borders."""
    history = some_ids(30)
    async with running(prefill_chunk=chunk) as rig:
        session_id = await rig.open()
        asked = capture(*EVERYTHING, top_logprobs=4)
        done = [
            await ended(rig.append(session_id, part, atomic=atomic, capture=asked))
            for part in (history[:11], history[11:12], history[12:])
        ]
        records = [record for one in done for record in one.records]
        assert [record.position for record in records] == list(range(30))
        assert [record.index for record in done[2].records] == list(range(18))
        assert all(set(record.points) == set(EVERYTHING) for record in records)
        assert all(record.finish_reason is None for record in records)
        assert_looks_like(records, history)
        assert_scored(records, history, top=4)
        assert [one.usage.steps for one in done] == [11, 1, 18]
        assert text_of(done[2].records) == TOKENIZER.decode(history[12:])


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("top", [0, 5])
@in_loop
async def test_a_generations_records(atomic: bool, top: int) -> None:
    prompt = some_ids(6)
    async with running() as rig:
        session_id = await rig.open(prompt)
        asked = capture(*EVERYTHING, top_logprobs=top)
        sampling = Sampling(temperature=1.5, top_k=40, seed=11, logit_bias={15496: 5.0})
        done = await ended(
            rig.generate(
                session_id, 12, atomic=atomic, capture=asked, sampling=sampling, ignore_eos=True
            )
        )
        history = [*prompt, *ids_of(done.records)]
        assert list(done.session.token_ids) == history
        assert [(r.index, r.position) for r in done.records] == [(i, 6 + i) for i in range(12)]
        assert [r.finish_reason for r in done.records] == [None] * 11 + ["length"]
        assert (done.usage.steps, done.usage.seed, done.usage.rebuilt_tokens) == (12, 11, 0)
        assert_looks_like(done.records, history)
        assert_scored(done.records, history, top=top)
        assert text_of(done.records) == TOKENIZER.decode(history[6:])


@in_loop
async def test_points_come_only_where_they_were_asked_for() -> None:
    history = some_ids(20)
    async with running(prefill_chunk=6) as rig:
        for names in (("wte",), ("wpe", "ln_f"), ("logits",)):
            asked = tuple(map(Point, names))
            session_id = await rig.open(history[:2])
            done = await rig.appended(
                session_id, history[2:], capture=capture(*asked, positions=frozenset({5, 13, 19}))
            )
            told = {r.position: set(r.points) for r in done.records if r.points}
            assert told == {position: set(asked) for position in (5, 13, 19)}
            assert_looks_like(done.records, history)
            done = await rig.generated(
                session_id, 3, capture=capture(*asked, positions=frozenset({21})), ignore_eos=True
            )
            assert [set(r.points) for r in done.records] == [set(), set(asked), set()]


@in_loop
async def test_a_record_of_logits_holds_no_more_memory_than_its_own_row() -> None:
    """A view of a whole batch's logits would hold 12.9 MB for one row."""
    async with running() as rig:
        session_id = await rig.open(some_ids(3))
        mates = [rig.generate(await rig.open([i]), 40, ignore_eos=True) for i in range(5)]
        asked = capture(Point("logits"), Point("ln_f"))
        done = await rig.generated(session_id, 10, capture=asked, ignore_eos=True)
        for mate in mates:
            await mate.result()
        for record in done.records:
            row = record.points[Point("logits")]
            assert row.base is None or row.base.nbytes == row.nbytes


@in_loop
async def test_p03_p15_generation_begins_at_the_stored_row_and_steps_nothing_again() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(6))
        await rig.generated(session_id, 3, ignore_eos=True)
        await rig.generated(session_id, 1, ignore_eos=True)
        passes = [range(6), *(range(p, p + 1) for p in (6, 7, 8, 9))]
        assert rig.model.passes == [[span] for span in passes]


def scripted(text_ids: Sequence[int]) -> partial[ScriptedLogits]:
    """Greedy decoding from `SCRIPT_START` on says exactly these ids."""
    return partial(ScriptedLogits, script=dict(enumerate(text_ids, start=SCRIPT_START)))


@pytest.mark.parametrize("atomic", [True, False])
@in_loop
async def test_t15_a_stop_over_tokens_is_committed_and_never_shown(atomic: bool) -> None:
    async with running(scripted([464, 32988, 17511, 23852, 464])) as rig:
        session_id = await rig.open(some_ids(SCRIPT_START))
        done = await ended(rig.generate(session_id, 20, stop=("DEFGHIJ",), atomic=atomic))
        assert ids_of(done.records) == [464, 32988, 17511, 23852]
        assert [r.text for r in done.records] == ["The", "", "", ""]
        last = done.records[-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", "DEFGHIJ")
        assert all(r.finish_reason is None for r in done.records[:-1])
        assert rig.length(session_id) == done.session.past_length == SCRIPT_START + 4


@pytest.mark.parametrize("atomic", [True, False])
@in_loop
async def test_t16_a_held_tail_is_flushed_by_length(atomic: bool) -> None:
    async with running(scripted([198, 198, 12982])) as rig:
        session_id = await rig.open(some_ids(SCRIPT_START))
        done = await ended(rig.generate(session_id, 3, stop=("\n\nUser:",), atomic=atomic))
        assert [r.text for r in done.records] == ["", "", "\n\nUser"]
        assert done.records[-1].finish_reason == "length"


@in_loop
async def test_t06_s13_characters_over_several_tokens() -> None:
    ids = [47249, 222, 8582, 97, 245, 447, 101, 201, 188]
    async with running(scripted(ids)) as rig:
        session_id = await rig.open(some_ids(SCRIPT_START))
        done = await rig.generated(session_id, 9)
        assert [r.text for r in done.records] == ["", "😀", "", "", "🤗", "", "\u2028", "\r", "\0"]
        appended = await rig.appended(session_id, [*ids, 47249])
        assert text_of(appended.records) == TOKENIZER.decode([*ids, 47249])
        assert appended.records[-1].text == "\ufffd"


@in_loop
async def test_a_stop_matches_this_calls_bytes_only() -> None:
    async with running(scripted([17511, 23852, 464])) as rig:
        session_id = await rig.open([1, 2, 32988])
        done = await rig.generated(session_id, 3, stop=("DEFGHIJ",))
        assert done.records[-1].finish_reason == "length"


@pytest.mark.parametrize("ignore_eos", [True, False])
@in_loop
async def test_end_of_text_is_stepped_and_ends_it_unless_ignored(ignore_eos: bool) -> None:
    async with running(scripted([464, END_OF_TEXT, 464, 464])) as rig:
        session_id = await rig.open(some_ids(SCRIPT_START))
        done = await rig.generated(session_id, 4, ignore_eos=ignore_eos)
        if ignore_eos:
            assert text_of(done.records) == "The<|endoftext|>TheThe"
            assert done.session.past_length == SCRIPT_START + 4
        else:
            last = done.records[-1]
            assert (last.finish_reason, last.stop_reason, last.text) == ("stop", END_OF_TEXT, "")
            assert done.session.token_ids[-1] == END_OF_TEXT


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-38, 9.9e-5])
@in_loop
async def test_n04_tiny_temperatures_are_greedy(temperature: float) -> None:
    async with running() as rig:
        cold = Sampling(temperature=temperature, seed=5)
        done = await rig.generated(await rig.open([15496]), 6, sampling=cold, ignore_eos=True)
        greedy = await rig.generated(await rig.open([15496]), 6, ignore_eos=True)
        assert ids_of(done.records) == ids_of(greedy.records)


@in_loop
async def test_n01_biased_and_filtered_logprobs_are_raw_and_finite() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(4))
        bias = dict.fromkeys(range(10), -100.0)
        sampling = Sampling(temperature=1, top_k=1, seed=1, logit_bias=bias)
        asked = capture(top_logprobs=5)
        done = await rig.generated(session_id, 5, sampling=sampling, capture=asked, ignore_eos=True)
        assert_scored(done.records, done.session.token_ids, top=5)


@in_loop
async def test_a_done_event_is_the_last() -> None:
    async with running() as rig:
        session_id = await rig.open([1])
        reply = rig.append(session_id, [1], atomic=False)
        events = [event async for event in reply]
        assert isinstance(events[-1], Done)
        assert events[-1].records == ()
        assert sum(isinstance(event, Done) for event in events) == 1


@in_loop
async def test_what_one_job_sees_in_one_iteration_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cheap = [point for point in EVERYTHING if not point.is_head_product]
    n_bytes = sum(point.n_bytes(CONFIG) for point in cheap)
    monkeypatch.setattr("engine.sight.CAPTURE_BYTES", 10 * n_bytes)
    for points, at_once in [((), 60), (cheap, 10), (EVERYTHING, 1)]:
        async with running() as rig:
            await rig.appended(await rig.open(), some_ids(60), capture=capture(*points))
            lengths = [len(row) for rows in rig.model.passes for row in rows]
            assert (max(lengths), sum(lengths)) == (at_once, 60)

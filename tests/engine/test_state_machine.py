"""Any sequence of requests, against the reference, with the books proved after every one."""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from embedding.errors import PositionOverflow
from engine.commands import Read, Truncate
from engine.errors import EmptySession, NoRoom
from engine.events import Done, StepRecord
from engine.limits import Limits
from engine.reply import Reply
from model.points import Point
from model.sampling import Sampling, choose
from sessions.edits import Edit, Intervention, StepEdits, edits_at
from sessions.errors import LengthOutOfRange
from tests.agreement import assert_agrees, tolerance
from tests.engine.editing import assert_looks_like, value
from tests.engine.rig import (
    CONFIG,
    LIVELY,
    Rig,
    capture,
    ended,
    ids_of,
    pieces,
    running,
    some_ids,
)
from tests.reference import reference_points

LOOKED_UP = (Point("wte"), Point("embedding"))
POINTS = (*LOOKED_UP, Point("resid_post", 0), Point("ln_f"), Point("logits"))
EDITS = (
    Edit(point="wte", op="scale", scale=0.5),
    Edit(point="resid_post.0", op="add", value=value(np.full(CONFIG.n_embd, 0.3, np.float32))),
    Edit(point="k.1[0]", op="scale", scale=0.0),
    Edit(point="z.0[1]", op="scale", scale=0.0),
    Edit(point="scores.1[0]", op="mask", keys=((1, 3),)),
    Edit(point="ln_f", op="scale", scale=2.0),
)
COMMON = some_ids(128, seed=7)  # what prompts begin with that share a prefix
IDS = st.one_of(
    st.lists(st.integers(0, 50256), min_size=1, max_size=40),
    st.integers(20, 100).map(lambda n: COMMON[:n]),
    st.builds(lambda n, tail: COMMON[:n] + tail, st.sampled_from([32, 64, 70]), st.just([1, 2])),
)
EDITED = st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 50)), max_size=2)
T = TypeVar("T")


class AnyRequests(RuleBasedStateMachine):
    """`histories` and `edits` are what each session must hold, by what its client was told."""

    sessions = Bundle("sessions")
    loop: asyncio.AbstractEventLoop
    rig: Rig

    @initialize(
        budget=st.integers(4, 12),
        chunk=st.sampled_from([1, 5, 16, 64]),
        buffer=st.sampled_from([1, 2000, Limits().reply_buffer_bytes]),
    )
    def start(self, budget: int, chunk: int, buffer: int) -> None:
        self.histories: dict[str, list[int]] = {}
        self.edits: dict[str, dict[int, StepEdits]] = defaultdict(dict)
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        engine = running(
            budget_bytes=pieces(budget), prefill_chunk=chunk, reply_buffer_bytes=buffer
        )
        self.rig = self.run(self.stack.enter_async_context(engine))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @rule(target=sessions, token_ids=st.one_of(st.just([]), IDS))
    def open(self, token_ids: list[int]) -> str:
        session_id = self.run(self.rig.open(token_ids))
        self.histories[session_id] = list(token_ids)
        return session_id

    @rule(target=sessions, parent=sessions, part=st.floats(0, 1), token_ids=st.none() | IDS)
    def fork(
        self, parent: str, part: float, token_ids: list[int] | None
    ) -> str | MultipleResults[str]:
        history = self.histories[parent]
        at, new = round(part * len(history)), token_ids or []
        try:
            child = self.run(self.rig.fork(parent, at, new, past_length=len(history)))
        except PositionOverflow:
            assert at + len(new) > CONFIG.n_ctx
            return multiple()
        self.histories[child] = history[:at] + new
        self.edits[child] = {p: made for p, made in self.edits[parent].items() if p < at}
        return child

    @rule(
        target=sessions,
        parent=sessions,
        part=st.floats(0, 0.99),
        keep=st.booleans(),
        edited=EDITED,
    )
    def replay(
        self, parent: str, part: float, keep: bool, edited: list[tuple[Edit, int]]
    ) -> str | MultipleResults[str]:
        history = self.histories[parent]
        if not history:
            return multiple()
        at = int(part * len(history))
        done = self.run(
            self.rig.forked(
                parent,
                at,
                replay=True,
                keep_edits=keep,
                interventions=interventions(edited, range(at, len(history))),
                capture=capture(*POINTS),
            )
        )
        child = done.session.id
        old = self.edits[parent]
        self.edits[child] = {p: made for p, made in old.items() if keep or p < at}
        for position in range(at, len(history)):
            self.edit(child, position, interventions(edited, range(at, len(history))))
        self.histories[child] = history[:at]
        self.accept(child, done)
        return child

    def edit(self, session_id: str, position: int, made: tuple[Intervention, ...]) -> None:
        edits = edits_at(made, position)
        if edits:
            own = self.edits[session_id]
            own[position] = own.get(position, ()) + edits

    @rule(
        session_id=sessions,
        fresh=st.booleans(),
        every=st.integers(1, 7),
        atomic=st.booleans(),
        points=st.sampled_from([("wte", "ln_f"), ("resid_post.*", "pattern.1", "logits[0,7]")]),
    )
    def read(
        self, session_id: str, fresh: bool, every: int, atomic: bool, points: tuple[str, ...]
    ) -> None:
        history = self.histories[session_id]
        if not history:
            return
        positions = range(0, len(history), every)
        done = self.run(
            self.rig.read(session_id, *points, positions=positions, fresh=fresh, atomic=atomic)
        )
        assert [record.position for record in done.records] == list(positions)
        assert_looks_like(done.records, history, self.edits[session_id])

    @rule(
        session_id=sessions,
        token_ids=IDS,
        atomic=st.booleans(),
        top=st.none() | st.integers(0, 3),
        points=st.sampled_from([(), LOOKED_UP, POINTS]),
        edited=EDITED,
    )
    def append(
        self,
        session_id: str,
        token_ids: list[int],
        atomic: bool,
        top: int | None,
        points: tuple[Point, ...],
        edited: list[tuple[Edit, int]],
    ) -> None:
        history = self.histories[session_id]
        asked = capture(*points, top_logprobs=top)
        steps = range(len(history), len(history) + len(token_ids))
        made = interventions(edited, steps)
        try:
            reply = self.rig.append(
                session_id,
                token_ids,
                atomic=atomic,
                capture=asked,
                past_length=len(history),
                interventions=made,
            )
        except PositionOverflow:
            assert len(history) + len(token_ids) > CONFIG.n_ctx
            return
        done = self.run(ended(reply))
        assert ids_of(done.records) == token_ids
        for position in steps:
            self.edit(session_id, position, made)
        self.accept(session_id, done)

    @rule(
        session_id=sessions,
        n=st.integers(1, 12),
        atomic=st.booleans(),
        sampling=st.builds(
            Sampling, temperature=st.sampled_from([0.0, 0.7, 1.5]), seed=st.integers(0, 2**63 - 1)
        ),
    )
    def generate(self, session_id: str, n: int, atomic: bool, sampling: Sampling) -> None:
        history = self.histories[session_id]
        asked = capture(*POINTS, top_logprobs=1)
        try:
            reply = self.rig.generate(
                session_id, n, atomic=atomic, sampling=sampling, capture=asked, ignore_eos=True
            )
        except EmptySession:
            assert not history
            return
        except PositionOverflow:
            assert len(history) + n > CONFIG.n_ctx
            return
        done = self.run(ended(reply))
        assert len(done.records) == n
        self.accept(session_id, done)
        seen = reference_points(LIVELY, self.histories[session_id], edits=self.edits[session_id])
        logits = seen["logits"].numpy()
        for record in done.records:
            assert_chosen(record, logits[record.position - 1], sampling)

    @rule(session_id=sessions, to=st.integers(-1, 130))
    def truncate(self, session_id: str, to: int) -> None:
        history = self.histories[session_id]
        command = Truncate(session_id=session_id, to=to, past_length=len(history))
        try:
            view = self.run(self.rig.engine.truncate(command))
        except LengthOutOfRange:
            assert not 0 <= to <= len(history)
            return
        del history[to:]
        self.edits[session_id] = {p: e for p, e in self.edits[session_id].items() if p < to}
        assert view.session.past_length == to

    @rule(session_id=consumes(sessions))
    def delete(self, session_id: str) -> None:
        self.run(self.rig.engine.delete(session_id))
        del self.histories[session_id]
        self.edits.pop(session_id, None)

    @rule(
        n=st.integers(1, 5),
        length=st.integers(20, 100),
        more=st.integers(10, 100),
        common=st.booleans(),
        atomic=st.booleans(),
    )
    def crowd(self, n: int, length: int, more: int, common: bool, atomic: bool) -> None:
        """Visitors generate more than there is room for: some wait, others lose their place."""
        more = min(more, CONFIG.n_ctx - length)
        visitors = {}
        for i in range(n):
            prompt = COMMON[:length] if common else some_ids(length, seed=i)
            visitors[self.run(self.rig.open(prompt))] = prompt
        self.histories |= visitors
        self.settle(
            {
                visitor: self.rig.generate(
                    visitor, more, atomic=atomic, ignore_eos=True, capture=capture(Point("ln_f"))
                )
                for visitor in visitors
            }
        )
        for visitor in visitors:
            self.delete(visitor)

    @rule(
        chosen=st.lists(sessions, min_size=2, max_size=4, unique=True),
        n=st.integers(1, 40),
        generating=st.lists(st.booleans(), min_size=4, max_size=4),
    )
    def together(self, chosen: list[str], n: int, generating: list[bool]) -> None:
        """Several sessions in one batch: as many as there is room for, and some must wait.

        They are read meanwhile, as they were before it.
        """
        replies, looks = {}, []
        for session_id, generates in zip(chosen, generating, strict=False):
            history = self.histories[session_id]
            if len(history) + n > CONFIG.n_ctx:
                continue
            if generates and history:
                replies[session_id] = self.rig.generate(
                    session_id, n, ignore_eos=True, capture=capture(Point("ln_f"))
                )
            else:
                replies[session_id] = self.rig.append(session_id, [7] * n)
            if history:
                seen = capture(*self.rig.points("ln_f", "resid_post.0", "pattern.1"))
                command = Read(session_id=session_id, capture=seen, fresh=n % 2 == 0, atomic=False)
                looks.append((session_id, len(history), self.rig.engine.read(command)))
        for look, done in zip(
            looks, self.settle(replies, [reply for *_, reply in looks]), strict=True
        ):
            session_id, length, _ = look
            if done is not None:
                assert [record.position for record in done.records] == list(range(length))
                assert_looks_like(
                    done.records, self.histories[session_id][:length], self.edits[session_id]
                )

    def settle(
        self, replies: Mapping[str, Reply], looks: Sequence[Reply] = ()
    ) -> Sequence[Done | None]:
        """Accept what each request brought, if it found room; returns what `looks` brought."""

        async def one(reply: Reply) -> Done | None:
            try:
                return await ended(reply)
            except NoRoom:
                return None

        async def all_of_them() -> Sequence[Done | None]:
            return await asyncio.gather(*map(one, [*replies.values(), *looks]))

        ends = self.run(all_of_them())
        for session_id, done in zip(replies, ends, strict=False):
            if done is not None:
                self.accept(session_id, done)
        return ends[len(replies) :]

    def accept(self, session_id: str, done: Done) -> None:
        """What was told becomes the history, and all that was told must be right."""
        history = self.histories[session_id]
        base = len(history)
        history += ids_of(done.records)
        positions = [record.position for record in done.records]
        assert positions == list(range(base, len(history)))
        assert done.usage.steps == len(positions)
        assert done.usage.cached_tokens <= len(positions)
        expected = reference_points(LIVELY, history, edits=self.edits[session_id])
        for point in done.records[0].points:
            ours = np.stack([record.points[point] for record in done.records])
            assert_agrees(ours, expected[str(point)][base:], what=str(point))
        for record in done.records:
            if record.logprob is not None:
                row = expected["logits"][record.position - 1].double().log_softmax(-1)
                assert abs(record.logprob - float(row[record.token_id])) < 1e-3

    @invariant()
    def everything_is_as_it_was_told(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.run(self.rig.settled())
        self.rig.check()
        engine = self.rig.engine
        assert {v.session.id for v in engine.views(limit=100).views} == set(self.histories)
        for session_id, history in self.histories.items():
            assert list(self.rig.session(session_id).token_ids) == history
            assert self.rig.session(session_id).edits == self.edits[session_id]
            assert not engine.registry.is_busy(session_id)
        assert self.rig.places() <= set(self.histories)
        for session_id, place in engine._thread.places._places.items():
            assert place.length == place.ready <= len(self.histories[session_id])

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.run(self.stack.aclose())
            self.loop.close()


def interventions(edited: list[tuple[Edit, int]], steps: range) -> tuple[Intervention, ...]:
    """Each edit from some step on, or before some step."""
    return tuple(
        Intervention(edit=edit, spans=((steps[place % len(steps)], None),))
        for edit, place in edited
    )


def assert_chosen(record: StepRecord, row: np.ndarray[Any, Any], sampling: Sampling) -> None:
    """The id that the reference's row gives, or one that is as likely within the tolerance."""
    row = row.copy()
    row[record.token_id] += 2 * float(tolerance(row)[record.token_id])
    assert choose(row, sampling, position=record.position) == record.token_id


TestAnyRequests = AnyRequests.TestCase
TestAnyRequests.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)

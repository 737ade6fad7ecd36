"""Any sessions at work in one ledger, against a plain record of what each must read."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from cache.accounting import KV, Copy, Ledger, Run
from cache.errors import CacheFull

Row = tuple[str, tuple[int, ...]]  # what a row depends on: whose it is, and all keys up to it
LEFT: Row = ("left by a failed step", ())
KEYS = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=10)
ANY = st.integers(0, 19)  # picks a session
FEW = st.sampled_from([1, 0, 2, 3, 5, 9])


class AnySessions(RuleBasedStateMachine):
    """The memory is a dictionary. A session's rows are right if each one was made from exactly the
    session's own steps, whoever made it."""

    @initialize(
        n_slots=st.sampled_from([4, 6, 3, 2, 1]),
        slot_pieces=st.sampled_from([4, 3, 2]),
        piece=st.sampled_from([4, 3, 5, 2, 1]),
        share=st.sampled_from([1, 0.8, 0.6, 0.4]),
    )
    def begin(self, n_slots: int, slot_pieces: int, piece: int, share: float) -> None:
        total = max(1, int(n_slots * slot_pieces * share))
        self.n_ctx = slot_pieces * piece
        self.books = Ledger(
            n_slots=n_slots, total_pieces=total, slot_pieces=slot_pieces, piece=piece
        )
        self.memory: dict[tuple[int, int], Row] = {}
        self.sessions: dict[KV, tuple[str, list[int]]] = {}  # owner, keys of the rows up to ready

    @rule(owner=st.sampled_from(["", "", "k"]), keys=KEYS)
    def open(self, owner: str, keys: list[int]) -> None:
        if len(self.sessions) == self.books.n_slots:
            with pytest.raises(CacheFull):
                self.books.open()
            return
        kv = self.books.open()
        self.sessions[kv] = owner, []
        self.write(kv, keys, is_whole=True)

    @rule(i=ANY, n_less=FEW, keys=KEYS)
    def fork(self, i: int, n_less: int, keys: list[int]) -> None:
        kv = self.session(i)
        length = max(0, kv.length - n_less)
        if len(self.sessions) == self.books.n_slots:
            with pytest.raises(CacheFull):
                self.books.fork(kv, length)
            return
        free = self.books.free_pieces
        child = self.books.fork(kv, length)
        assert child.length == length
        assert self.books.free_pieces == free
        owner, before = self.sessions[kv]
        self.sessions[child] = owner, before[: child.length]
        self.write(child, keys, is_whole=True)

    @rule(i=ANY, n_more=st.integers(0, 12))
    def reserve(self, i: int, n_more: int) -> None:
        kv = self.session(i)
        self.make_room(kv, kv.ready + n_more)

    @rule(i=ANY, keys=KEYS, is_whole=st.sampled_from([True, True, True, False]))
    def step(self, i: int, keys: list[int], is_whole: bool) -> None:
        kv = self.session(i)
        kv.advance(kv.ready - kv.length)
        self.write(kv, keys, is_whole=is_whole)

    @rule(i=ANY, n=FEW)
    def advance_over_ready_rows(self, i: int, n: int) -> None:
        kv = self.session(i)
        kv.advance(min(n, kv.ready - kv.length))

    @rule(i=ANY, n_less=FEW, keys=KEYS)
    def truncate(self, i: int, n_less: int, keys: list[int]) -> None:
        kv = self.session(i)
        length = max(0, kv.length - n_less)
        self.apply(self.books.truncate(kv, length))
        assert kv.length == kv.ready == kv.written == length
        assert kv.reserved < length + self.books.piece
        del self.sessions[kv][1][length:]
        self.write(kv, keys, is_whole=True)

    @rule(i=ANY, like=ANY, more=KEYS, n_less=FEW)
    def adopt(self, i: int, like: int, more: list[int], n_less: int) -> None:
        """Ask for what another session has, as far as they agree, or for something else."""
        kv, other = self.session(i), self.session(like)
        owner, keys = self.sessions[kv]
        asked = keys[: kv.length] + self.sessions[other][1][kv.length :] + more
        limit = max(0, len(asked) - n_less)
        before = kv.length, kv.ready
        self.apply(self.books.adopt(kv, owner, asked, limit=limit))
        assert kv.length == before[0]
        if kv.ready != before[1]:
            assert before[1] < kv.ready <= min(limit, len(asked))
            keys[:] = asked[: kv.ready]

    @rule(i=ANY, n_keys=st.integers(-3, 3))
    def index(self, i: int, n_keys: int) -> None:
        kv = self.session(i)
        owner, keys = self.sessions[kv]
        offered = (keys[: kv.length] + [0] * 3)[: max(0, kv.length + n_keys)]
        is_new = min(kv.length, len(offered)) // self.books.piece > kv.indexed
        self.books.index(kv, owner, offered)
        if is_new:
            found = self.books.pool.index.chain(owner, keys[: kv.length])
            assert len(found) >= kv.indexed == min(kv.length, len(offered)) // self.books.piece

    @rule(i=ANY, is_indexed=st.booleans())
    def close(self, i: int, is_indexed: bool) -> None:
        if is_indexed:
            self.index(i, 0)
        kv = self.session(i)
        self.apply(self.books.close(kv))
        del self.sessions[kv]

    @invariant()
    def every_session_reads_its_own_history(self) -> None:
        for kv, (owner, keys) in self.sessions.items():
            assert len(keys) == kv.ready
            rows = [self.memory[kv.slot_of(p), p] for p in range(kv.ready)]
            assert rows == [(owner, tuple(keys[: p + 1])) for p in range(kv.ready)]

    @invariant()
    def what_is_free_is_empty_and_what_failed_is_nobody_elses(self) -> None:
        left = {at for at, row in self.memory.items() if row == LEFT}
        assert left <= {at for kv in self.sessions for at in self.left_by(kv)}
        in_use = {p for kv in self.sessions for p in kv.pieces} | set(self.books.pool.index)
        assert {(slot, p // self.books.piece) for slot, p in self.memory} <= in_use

    @invariant()
    def the_books_are_right(self) -> None:
        self.books.check()
        held = {piece for kv in self.sessions for piece in kv.pieces}
        assert self.books.free_pieces == self.books.total_pieces - len(held)
        assert self.books.free_places == self.books.n_slots - len(self.sessions)

    def teardown(self) -> None:
        """All closed, everything can be had again; taken whole, nothing cached is left."""
        for kv in self.sessions:
            self.apply(self.books.close(kv))
        assert self.books.free_pieces == self.books.total_pieces
        places = [self.books.open() for _ in range(self.books.n_slots)]
        for kv in places:
            pieces = min(self.books.slot_pieces, self.books.free_pieces)
            self.apply(*self.books.reserve(kv, pieces * self.books.piece))
        assert self.memory == {}
        assert list(self.books.pool.index) == []
        for kv in places:
            self.apply(self.books.close(kv))
        assert (self.books.pool.n_held, self.books.pool.n_cached) == (0, 0)
        self.books.check()

    def session(self, i: int) -> KV:
        """Some session: mostly one with rows, opened if there is none."""
        if not self.sessions:
            self.open("", [0] * 7)
        with_rows = [kv for kv in self.sessions if kv.length]
        some = with_rows if with_rows and i % 4 else list(self.sessions)
        return some[i % len(some)]

    def make_room(self, kv: KV, length: int) -> None:
        length = min(length, self.n_ctx)
        before = self.books.free_pieces, list(kv.slots), kv.owned, dict(self.memory)
        needed = self.books.pieces_needed(kv, length)
        if needed > before[0]:
            with pytest.raises(CacheFull):
                self.books.reserve(kv, length)
            assert (self.books.free_pieces, kv.slots, kv.owned, self.memory) == before
            return
        dropped, copied = self.books.reserve(kv, length)
        self.apply(dropped, copied)
        assert needed == len(kv.slots) - len(before[1]) + (copied is not None)
        left = self.books.free_pieces - before[0] + needed
        assert left in ([0, 1] if copied else [0])  # a copied piece may be nobody's then
        assert kv.reserved >= length
        assert kv.owns_next or length == kv.ready

    def write(self, kv: KV, keys: list[int], *, is_whole: bool) -> None:
        """Step as many of `keys` as there is room for."""
        self.make_room(kv, kv.length + len(keys))
        if not kv.owns_next:
            return
        owner, before = self.sessions[kv]
        keys = keys[: kv.reserved - kv.length]
        kv.stage(len(keys))
        for position in range(kv.length, kv.length + len(keys)):
            at = kv.slot_of(position), position
            assert not any(self.reads(other, at) for other in self.sessions)
            made = owner, (*before, *keys[: position - kv.length + 1])
            self.memory[at] = made if is_whole else LEFT
        if is_whole:
            kv.advance(len(keys))
            before += keys

    def apply(self, dropped: Sequence[Run], copied: Copy | None = None) -> None:
        for run in dropped:
            for position in range(run.start, run.stop):
                self.memory.pop((run.slot, position), None)
        if copied:
            assert 0 < len(copied.positions) < self.books.piece
            for position in copied.positions:
                self.memory[copied.dst, position] = self.memory[copied.src, position]

    def reads(self, kv: KV, at: tuple[int, int]) -> bool:
        return at[1] < kv.ready and kv.slot_of(at[1]) == at[0]

    def left_by(self, kv: KV) -> list[tuple[int, int]]:
        return [(kv.slot_of(p), p) for p in range(kv.ready, kv.written)]


TestAnySessions = AnySessions.TestCase
TestAnySessions.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)

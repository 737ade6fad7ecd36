"""One admitted request with tokens to step. Numpy, no torch; the model thread.

A job knows `tokens`: the session's, then the new ones. The work is `tokens[kv.length:]`, whether
they are a prompt, a sampled token or a history whose K/V was evicted; the job only catches up.
Positions below `reported` have had their records, here or before, and are rebuilt without.

    0 ........ base ............ kv.length ....... len(tokens)
    committed  | new, stepped    | still to step   |

Rows that another session has computed are found in the cache (`kv.ready`) and not stepped, unless
what the request asks for has to be computed.

A job that reads has no new tokens: it reports committed ones, from position 0 on. Those that are
present are read again, which writes nothing; to the rest it catches up like any other.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cache.accounting import KV
from embedding.tokenizer import Tokenizer
from engine.edits import Edits
from engine.events import StepRecord, Usage
from engine.generation import Generation
from engine.reply import Reply
from engine.scheduler import Demand
from engine.sight import LogitsRow, Sight
from engine.text import ShownText
from model.batch import Captured, Row
from sessions.edits import step_keys
from sessions.session import Session

Kind = Literal["open", "append", "generate", "read", "probe"]


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request on its way. `session` is as this job last committed it."""

    kind: Kind
    session: Session
    new_ids: tuple[int, ...]
    sight: Sight
    edits: Edits
    reply: Reply
    tokenizer: Tokenizer
    atomic: bool = True
    fresh: bool = False  # nothing that is cached is used
    subject: Session | None = None  # that a passing job is about, and that its client knows
    generation: Generation | None = None
    admitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    base: int = field(init=False)
    tokens: list[int] = field(init=False)
    records: list[StepRecord] = field(init=False, default_factory=list)  # of an atomic job
    reported: int = field(init=False)
    rebuilt: int = field(init=False, default=0)
    cached: int = field(init=False, default=0)
    _kv: KV | None = field(init=False, default=None)
    _next: LogitsRow | None = field(init=False, default=None)  # the row the next id is chosen from
    _shown: ShownText = field(init=False, default_factory=ShownText)

    def __post_init__(self) -> None:
        self.base = self.session.past_length
        self.reported = 0 if self.reads else self.base
        self.tokens = [*self.session.token_ids, *self.new_ids]

    @property
    def opening(self) -> bool:
        """Whether its session exists only once it is done."""
        return self.kind == "open"

    @property
    def passing(self) -> bool:
        """Whether its session never exists: nobody keeps what it steps."""
        return self.kind in ("read", "probe")

    @property
    def unknown(self) -> bool:
        """Whether no client has its session, not yet or never."""
        return self.opening or self.passing

    @property
    def reads(self) -> bool:
        """Whether it reports what is committed and steps nothing new."""
        return self.kind == "read"

    @property
    def kv(self) -> KV:
        """The session's place in the cache; given when the job starts."""
        assert self._kv is not None, "it has no place"
        return self._kv

    @property
    def placed(self) -> bool:
        """Whether it has a place and can step."""
        return self._kv is not None

    @property
    def step_keys(self) -> Sequence[Hashable]:
        """See `Session.step_keys`; of all known tokens."""
        return step_keys(self.tokens, self.edits.between(range(len(self.tokens))))

    def start(self, kv: KV) -> None:
        """Take the place that was reserved for this job."""
        self._kv = kv
        if self.reads:
            kv.advance(kv.ready - kv.length)  # whoever computed them, they can be read

    def suspend(self) -> None:
        """Give the place up and wait; what was chosen stays, what was stepped is stepped again."""
        self._kv = self._next = None
        self.sight.forget()

    # What there is to do.

    @property
    def todo(self) -> int:
        """Known tokens that are not cached yet."""
        return len(self.tokens) - self.kv.length

    @property
    def wants_id(self) -> bool:
        """Whether it has caught up and an id must be chosen to go on."""
        return self.todo == 0 and self.generation is not None and self.finish_reason is None

    @property
    def done(self) -> bool:
        """Whether all tokens are stepped and reported, and no more will be chosen."""
        return self.todo == 0 and not self.to_read and not self.wants_id

    @property
    def reusable(self) -> int:
        """How many of the known tokens need not be computed here if their rows are found."""
        if self.fresh:
            return 0
        if self.reads:
            return len(self.tokens)
        computed = self.sight.first_computed(self.reported, edited=bool(self.edits))
        return len(self.tokens) if computed is None else min(computed, len(self.tokens))

    @property
    def finds(self) -> bool:
        """Whether the next rows are in the cache already."""
        return self.kv.ready > self.kv.length

    @property
    def to_read(self) -> range:
        """The next positions that are to be reported and present: none unless it reads."""
        if not self.reads:
            return range(0)
        wanted = (p for p in range(self.reported, self.kv.length) if self.sight.shows(p))
        first = next(wanted, self.kv.length)
        stop = first
        while stop < self.kv.length and self.sight.shows(stop):
            stop += 1
        return range(first, stop)

    def demand(self, buffer_bytes: int) -> Demand:
        """What it could do now, given how far its reader is behind."""
        if not self.placed:
            return Demand(todo=0, chunk=0)
        if self.finds:
            found = range(self.kv.length, self.kv.ready)
            chunk = self._readable(found, buffer_bytes)
            return Demand(todo=len(found) if chunk else 0, chunk=chunk, found=True)
        todo = self.to_read or self._to_step(max(1, self.todo))  # caught up: it chooses an id first
        n_again = max(0, min(self.reported - todo.start, len(todo)))  # nobody looks at those
        n_at_once = n_again + self.sight.at_once(todo[n_again:])
        chunk = self._readable(todo[:n_at_once], buffer_bytes)
        return Demand(todo=len(todo) if chunk else 0, chunk=chunk)

    def _to_step(self, n: int) -> range:
        return range(self.kv.length, self.kv.length + n)

    def n_written(self, n: int) -> int:
        """How many rows its next `n` positions add to the cache."""
        return 0 if self.to_read else n

    def _readable(self, positions: range, buffer_bytes: int) -> int:
        """For how many of the next positions the reader has room now."""
        if self.atomic:
            return len(positions)
        weights = (self.sight.weight(p) if self._reports(p) else 0 for p in positions)
        return self.reply.room(weights, buffer_bytes)

    # One iteration, in this order: choose, row, advance, unscored, score, stepped.

    def wants_first_row(self) -> bool:
        """Whether it must choose an id but has not seen the row to choose from."""
        return self.wants_id and self._next is None

    def choose(self) -> None:
        """Choose the next id from the row that `score` was given."""
        assert self.generation is not None
        assert self._next is not None
        position = len(self.tokens)
        token_id = self.generation.choose(self._next, position)
        self.sight.score(position, self._next, token_id)
        self._next = None
        self.tokens.append(token_id)

    def row(self, n: int) -> Row:
        """The next `n` tokens, as the model wants them."""
        self.started = self.started or time.monotonic()
        positions = self.to_read[:n] or self._to_step(n)
        return Row(
            kv=self.kv,
            token_ids=self.tokens[positions.start : positions.stop],
            start=positions.start,
            points=self.sight.passed,
            captured=[p - positions.start for p in self.seen(positions)],
            edits={p - positions.start: e for p, e in self.edits.between(positions).items()},
        )

    def advance(self, positions: range) -> None:
        """Count rows that are present now as read, found, rebuilt or new."""
        if positions.start < self.kv.length:
            self.cached += len(positions)
            return
        n_again = max(0, min(positions.stop, max(self.base, self.reported)) - positions.start)
        if self.finds:
            self.cached += len(positions) - n_again
        else:
            self.rebuilt += n_again
        self.kv.advance(len(positions))

    def unscored(self, stepped: range) -> list[int]:
        """Positions whose logits this job needs, now that `stepped` are cached."""
        new = self._unreported(stepped)
        wanted = {p for p in new if self.sight.wants_logits(p)}
        if self.sight.capture.top_logprobs is not None and self.generation is None:
            scored = (p for p in new if self._reports(p) and not self.sight.is_scored(p))
            wanted |= {p - 1 for p in scored if p > 0}
        if self.wants_id:
            wanted.add(len(self.tokens) - 1)
        return sorted(wanted)

    def score(self, position: int, row: LogitsRow) -> None:
        """Take the logits [V] at `position`, which score the token after it.

        What is kept is copied: a view would keep its mates' rows in memory too.
        """
        after = position + 1
        if self.wants_id and after == len(self.tokens):
            self._next = row.copy()
        if position >= self.reported and self.sight.wants_logits(position):
            self.sight.take_logits(position, row)
        if self.generation is None and after < len(self.tokens):
            self.sight.score(after, row, self.tokens[after])

    def seen(self, positions: range) -> list[int]:
        """Those of `positions` whose points are captured, in the order of the capture."""
        return [p for p in self._unreported(positions) if self.sight.sees(p)]

    def stepped(self, positions: range, captured: Captured) -> list[StepRecord]:
        """The records of `positions`, now present and scored."""
        new = self._unreported(positions)
        if new and self.first_token is None:
            self.first_token = time.monotonic()
        places = {p: i for i, p in enumerate(self.seen(positions))}
        records = [self._record(p, captured, places.get(p)) for p in new if self._reports(p)]
        self.reported = max(self.reported, positions.stop)
        return records

    def _record(self, position: int, captured: Captured, place: int | None) -> StepRecord:
        return self.sight.record(
            position,
            captured,
            place,
            token_id=self.tokens[position],
            text=self._text(position),
            edits=self.edits.at(position),
            finish_reason=self.finish_reason,
            stop_reason=self.generation.stop_reason if self.generation else None,
        )

    def _text(self, position: int) -> str:
        if self.generation is not None:
            return self.generation.text
        text = self._shown.push(self.tokenizer.token_bytes(self.tokens[position]))
        return text + self._shown.flush() if position == len(self.tokens) - 1 else text

    def _reports(self, position: int) -> bool:
        """Whether a step has a record still: all that are kept, and those that were asked for."""
        return position >= self.reported and (not self.passing or self.sight.shows(position))

    def _unreported(self, positions: range) -> range:
        return range(max(positions.start, self.reported), positions.stop)

    # The end.

    @property
    def n_new(self) -> int:
        """The most tokens it may add."""
        return self.generation.max_tokens if self.generation else len(self.new_ids)

    @property
    def n_generated(self) -> int:
        """Ids that were chosen."""
        return len(self.tokens) - self.base - len(self.new_ids)

    @property
    def finish_reason(self) -> str | None:
        """Why generation ended; None for an append."""
        return self.generation.finish_reason if self.generation else None

    def committed(self) -> Session:
        """The session with all that is stepped and not in it yet."""
        new = range(self.session.past_length, self.kv.length)
        token_ids = tuple(self.tokens[new.start : new.stop])
        return self.session.committed(token_ids, self.edits.between(new))

    def usage(self) -> Usage:
        """What it cost so far."""
        return Usage(
            steps=len(self.tokens) - self.base,
            cached_tokens=self.cached,
            rebuilt_tokens=self.rebuilt,
            seed=self.generation.seed if self.generation else None,
        )

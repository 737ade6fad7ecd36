"""One admitted request with tokens to step. Numpy, no torch; the model thread.

A job knows `tokens`: the session's, then the new ones. The work is `tokens[kv.length:]`, whether
they are a prompt, a sampled token or a history whose K/V was evicted; the job only catches up.
Positions below `reported` have had their records, here or before, and are rebuilt without.

    0 ........ base ............ kv.length ....... len(tokens)
    committed  | new, stepped    | still to step   |

Rows that another session has computed are found in the cache (`kv.ready`) and not stepped, unless
what the request asks for has to be computed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cache.accounting import KV
from embedding.tokenizer import Tokenizer
from engine.commands import Capture
from engine.events import StepRecord, TopLogprob, Usage
from engine.generation import Generation
from engine.limits import LOGITS_ROWS
from engine.reply import Reply
from engine.scheduler import Demand
from engine.text import ShownText
from model.batch import Captured, Row
from model.points import Point
from model.sampling import logprobs
from sessions.session import Session

LOGITS = Point("logits")
_RECORD_BYTES = 512  # one record without its points, roughly

LogitsRow = npt.NDArray[np.float32]  # [V]
_Score = tuple[float, tuple[TopLogprob, ...]]


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One append or generate on its way. `session` is as this job last committed it."""

    kind: str
    session: Session
    new_ids: tuple[int, ...]
    n_new: int  # the most tokens it may add
    capture: Capture
    point_bytes: int  # of one record's points
    atomic: bool
    opening: bool  # the session exists only once this job is done
    reply: Reply
    tokenizer: Tokenizer
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
    _scores: dict[int, _Score] = field(init=False, default_factory=dict)  # by position
    _logits: dict[int, LogitsRow] = field(init=False, default_factory=dict)  # by position
    _shown: ShownText = field(init=False, default_factory=ShownText)

    def __post_init__(self) -> None:
        self.base = self.reported = self.session.past_length
        self.tokens = [*self.session.token_ids, *self.new_ids]

    @property
    def kv(self) -> KV:
        """The session's place in the cache; given when the job starts."""
        assert self._kv is not None, "it has no place"
        return self._kv

    @property
    def placed(self) -> bool:
        """Whether it has a place and can step."""
        return self._kv is not None

    def start(self, kv: KV) -> None:
        """Take the place that was reserved for this job."""
        self._kv = kv

    def suspend(self) -> None:
        """Give the place up and wait; what was chosen stays, what was stepped is stepped again."""
        self._kv = self._next = None
        self._logits.clear()

    # What there is to do.

    @property
    def todo(self) -> int:
        """Known tokens that are not cached yet."""
        return len(self.tokens) - self.kv.length

    @property
    def wants_id(self) -> bool:
        """Whether it has caught up and an id must be chosen to go on."""
        return self.todo == 0 and not self.done

    @property
    def done(self) -> bool:
        """Whether all tokens are stepped and no more will be chosen."""
        chosen = self.generation is None or self.generation.finish_reason is not None
        return self.todo == 0 and chosen

    @property
    def reusable(self) -> int:
        """How many of the known tokens need not be computed here if their rows are found."""
        computed = self.capture.first_computed(self.reported)
        return len(self.tokens) if computed is None else min(computed, len(self.tokens))

    @property
    def finds(self) -> bool:
        """Whether the next rows are in the cache already."""
        return self.kv.ready > self.kv.length

    def demand(self, buffer_bytes: int) -> Demand:
        """What it could do now, given how far its reader is behind."""
        if not self.placed:
            return Demand(todo=0, chunk=0)
        if self.finds:
            n_found = self.kv.ready - self.kv.length
            chunk = self._readable(n_found, buffer_bytes)
            return Demand(todo=n_found if chunk else 0, chunk=chunk, found=True)
        todo = max(1, self.todo)  # one that has caught up chooses an id first
        chunk = min(todo, LOGITS_ROWS) if self._reads_logits else todo
        chunk = self._readable(chunk, buffer_bytes)
        return Demand(todo=todo if chunk else 0, chunk=chunk)

    def _readable(self, n: int, buffer_bytes: int) -> int:
        """As many of `n` records as the reader has room for now."""
        if self.atomic:
            return n
        per_record = _RECORD_BYTES + self.point_bytes
        n = min(n, max(1, buffer_bytes // per_record))
        return 0 if self._backlog_after(n * per_record) > buffer_bytes else n

    @property
    def _reads_logits(self) -> bool:
        """Whether every step costs a row of logits, and not the last one of a prompt only."""
        return self.capture.top_logprobs is not None or LOGITS in self.capture.points

    def _backlog_after(self, more: int) -> int:
        backlog = self.reply.backlog_bytes
        return backlog + more if backlog else 0  # a reader with nothing to read always gets more

    # One iteration, in this order: choose, row, score, stepped.

    def wants_first_row(self) -> bool:
        """Whether it must choose an id but has not seen the row to choose from."""
        return self.wants_id and self._next is None

    def choose(self) -> None:
        """Choose the next id from the row that `score` was given."""
        assert self.generation is not None
        assert self._next is not None
        position = len(self.tokens)
        token_id = self.generation.choose(self._next, position)
        if self.capture.top_logprobs is not None:
            self._scores[position] = _score(self._next, token_id, self.capture.top_logprobs)
        self._next = None
        self.tokens.append(token_id)

    def row(self, n: int) -> Row:
        """The next `n` tokens, as the model wants them."""
        self.started = self.started or time.monotonic()
        first = self.kv.length
        positions = range(first, first + n)
        points = tuple(point for point in self.capture.points if point != LOGITS)
        return Row(
            kv=self.kv,
            token_ids=self.tokens[first : first + n],
            points=points,
            captured=[p - first for p in self._unreported(positions) if self._wants_points(p)],
        )

    def unscored(self, stepped: range) -> list[int]:
        """Positions whose logits this job needs, now that `stepped` are cached."""
        new = self._unreported(stepped)
        wanted = {p for p in new if self._wants_points(p) and LOGITS in self.capture.points}
        if self.capture.top_logprobs is not None and self.generation is None:
            wanted |= {p - 1 for p in new if p > 0 and p not in self._scores}
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
        if self._wants_points(position) and LOGITS in self.capture.points:
            self._logits[position] = row.copy()
        top_logprobs = self.capture.top_logprobs
        if top_logprobs is not None and self.generation is None and after < len(self.tokens):
            self._scores[after] = _score(row, self.tokens[after], top_logprobs)

    def stepped(self, positions: range, captured: Captured) -> list[StepRecord]:
        """The records of `positions`, now present and scored."""
        new = self._unreported(positions)
        if new and self.first_token is None:
            self.first_token = time.monotonic()
        places = {p: i for i, p in enumerate(filter(self._wants_points, new))}
        records = [self._record(p, captured, places.get(p)) for p in new]
        self.reported = max(self.reported, positions.stop)
        return records

    def advance(self, n: int) -> None:
        """Count the next `n` rows, which are present now, as found, rebuilt or new."""
        first = self.kv.length
        n_new = len(self._unreported(range(first, first + n)))
        if self.finds:
            self.cached += n_new
        else:
            self.rebuilt += n - n_new
        self.kv.advance(n)

    def _record(self, position: int, captured: Captured, place: int | None) -> StepRecord:
        last = position == len(self.tokens) - 1
        logprob, top = self._scores.pop(position, (None, None))
        return StepRecord(
            index=position - self.base,
            position=position,
            token_id=self.tokens[position],
            text=self._text(position, last=last),
            logprob=logprob,
            top_logprobs=top,
            points={} if place is None else self._points(position, captured, place),
            finish_reason=self.finish_reason,
            stop_reason=self.generation.stop_reason if self.generation else None,
        )

    def _text(self, position: int, *, last: bool) -> str:
        if self.generation is not None:
            return self.generation.text
        text = self._shown.push(self.tokenizer.token_bytes(self.tokens[position]))
        return text + self._shown.flush() if last else text

    def _points(
        self, position: int, captured: Captured, place: int
    ) -> dict[Point, npt.NDArray[np.float32]]:
        points = {point: rows[place] for point, rows in captured.items()}
        if LOGITS in self.capture.points:
            points[LOGITS] = self._logits.pop(position)
        return points

    def _wants_points(self, position: int) -> bool:
        return position >= self.reported and self.capture.wants_points_at(position)

    def _unreported(self, positions: range) -> range:
        return range(max(positions.start, self.reported), positions.stop)

    # The end.

    @property
    def n_generated(self) -> int:
        """Ids that were chosen."""
        return len(self.tokens) - self.base - len(self.new_ids)

    @property
    def finish_reason(self) -> str | None:
        """Why generation ended; None for an append."""
        return self.generation.finish_reason if self.generation else None

    def usage(self) -> Usage:
        """What it cost so far."""
        return Usage(
            steps=len(self.tokens) - self.base,
            cached_tokens=self.cached,
            rebuilt_tokens=self.rebuilt,
            seed=self.generation.seed if self.generation else None,
        )

    def n_bytes(self, records: Sequence[StepRecord]) -> int:
        """What `records` weigh in a reader's buffer."""
        arrays = sum(a.nbytes for record in records for a in record.points.values())
        return arrays + _RECORD_BYTES * len(records)


def _score(row: LogitsRow, token_id: int, top_n: int) -> _Score:
    logprob, top = logprobs(row, token_id, top_n)
    return logprob, tuple(TopLogprob(i, lp) for i, lp in top)

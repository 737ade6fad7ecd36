"""Models and logs that misbehave, through the protocols that the engine has for them."""

import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from cache.accounting import KV
from embedding.tables import EmbeddingTables
from engine.protocol import Finished, Model
from model.batch import Captured, Floats, Row
from model.config import GPT2Config
from sessions.errors import LogError
from sessions.log import Entry, MemoryLog
from sessions.session import Session

Rows = Sequence[Row]


class Watched:
    """A real model, and what was asked of it: for each pass, each row's positions and slot."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.passes: list[list[range]] = []
        self.slots: list[list[int]] = []

    @property
    def config(self) -> GPT2Config:
        return self._model.config

    @property
    def tables(self) -> EmbeddingTables:
        return self._model.tables

    @property
    def dtype(self) -> str:
        return self._model.dtype

    def forward(self, rows: Rows) -> list[Captured]:
        captured = self._model.forward(rows)
        self.passes.append([row.positions for row in rows])
        self.slots.append([row.kv.slots[0] for row in rows])
        return captured

    def look_up(self, row: Row) -> Captured:
        return self._model.look_up(row)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._model.parameters

    def logits(self, wanted: Sequence[tuple[KV, int]], hidden: Floats | None = None) -> Floats:
        return self._model.logits(wanted, hidden)

    def release(self) -> None:
        """Let a blocked pass go, for good."""


class Gated(Watched):
    """Each pass waits at a gate until the test lets it through."""

    def __init__(self, model: Model, *, open_passes: int = 0) -> None:
        super().__init__(model)
        self._permits = threading.Semaphore(open_passes)
        self._open_for_good = False
        self.arrived = threading.Event()  # a pass waits, or has waited, at the gate

    def let(self, n_passes: int) -> None:
        self._permits.release(n_passes)

    def release(self) -> None:
        self._open_for_good = True
        self._permits.release()

    def forward(self, rows: Rows) -> list[Captured]:
        self.arrived.set()
        self._permits.acquire()
        if self._open_for_good:
            self._permits.release()
        return self.let_through(rows)

    def let_through(self, rows: Rows) -> list[Captured]:
        """What happens behind the gate."""
        return super().forward(rows)


class Failing(Gated):
    """Raises where `when` says so, of the rows of a pass. Its gate is open unless it is told."""

    def __init__(
        self,
        model: Model,
        when: Callable[[Rows], bool],
        error: type[BaseException] = RuntimeError,
        open_passes: int = 1 << 30,
    ) -> None:
        super().__init__(model, open_passes=open_passes)
        self.when = when
        self.error = error

    def let_through(self, rows: Rows) -> list[Captured]:
        if self.when(rows):
            raise self.error("a fault that the test planted")
        return super().let_through(rows)


def steps_token(token_id: int) -> Callable[[Rows], bool]:
    """Whether any row steps this id."""
    return lambda rows: any(token_id in row.token_ids for row in rows)


def steps_position(position: int) -> Callable[[Rows], bool]:
    """Whether any row steps this position."""
    return lambda rows: any(position in row.positions for row in rows)


class FailingLogits(Watched):
    """Fails to read logits at one position."""

    def __init__(self, model: Model, position: int) -> None:
        super().__init__(model)
        self._position = position

    def logits(self, wanted: Sequence[tuple[KV, int]], hidden: Floats | None = None) -> Floats:
        if any(position == self._position for _, position in wanted):
            raise RuntimeError("a fault that the test planted")
        return super().logits(wanted, hidden)


class ScriptedLogits(Watched):
    """Its likeliest id at position p is `script[p]`: a text of the test's choice."""

    def __init__(self, model: Model, script: dict[int, int]) -> None:
        super().__init__(model)
        self._script = script

    def logits(self, wanted: Sequence[tuple[KV, int]], hidden: Floats | None = None) -> Floats:
        rows = super().logits(wanted, hidden)
        for row, (_, position) in zip(rows, wanted, strict=False):  # hidden rows follow
            if position + 1 in self._script:
                row[self._script[position + 1]] = row.max() + 100
        return rows


class FailingLog:
    """A memory log that refuses the batches for which `when` holds."""

    def __init__(self, when: Callable[[Sequence[Entry]], bool]) -> None:
        self.kept = MemoryLog()
        self.when = when
        self.sessions: dict[str, Session] = {}

    def commit(self, batch: Sequence[Entry]) -> None:
        if self.when(batch):
            raise LogError("the test's disk is full")
        self.kept.commit(batch)
        self.sessions = {session.id: session for session in self.kept.load()}

    def load(self) -> list[Session]:
        return self.kept.load()

    def close(self) -> None:
        self.kept.close()


class Counting:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []  # rows and tokens of each iteration
        self.ended: list[Finished] = []

    def iteration(self, *, n_rows: int, n_tokens: int, seconds: float) -> None:
        self.tokens.append((n_rows, n_tokens))

    def finished(self, request: Finished) -> None:
        self.ended.append(request)

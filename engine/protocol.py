"""What the engine needs of its neighbours. Each has one shipped implementation; tests bring theirs.

Model       `model.gpt2.GPT2`: stepped only on the model thread
Observer    `server.metrics.Metrics`: told on the model thread, must not wait
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cache.accounting import KV
from embedding.tables import EmbeddingTables
from model.batch import Captured, Floats, Row
from model.config import GPT2Config


class Model(Protocol):
    """A model that steps rows over a K/V cache."""

    @property
    def config(self) -> GPT2Config:
        """Shape of the model."""
        ...

    @property
    def tables(self) -> EmbeddingTables:
        """Token and position tables; read-only, any thread."""
        ...

    @property
    def dtype(self) -> str:
        """The precision it computes in."""
        ...

    def forward(self, rows: Sequence[Row]) -> list[Captured]:
        """Step the rows' tokens and leave keys, values and `ln_f` rows in the cache."""
        ...

    def look_up(self, row: Row) -> Captured:
        """The row's points, all of which are looked up, without stepping its tokens."""
        ...

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Weights that it holds in float32, by the checkpoint's names; read-only, any thread."""
        ...

    def logits(self, wanted: Sequence[tuple[KV, int]], hidden: Floats | None = None) -> Floats:
        """Logits [n + m, V] at positions that are in the cache, then of rows `hidden` [m, C]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How one request went. Times in seconds, from its admission."""

    kind: str  # of `engine.job.Kind`
    reason: str  # "stop", "length", "done" or the name of an error class
    n_prompt: int  # tokens the client gave
    n_generated: int
    n_cached: int  # prompt tokens whose K/V was found, not computed
    n_rebuilt: int  # tokens stepped again because their K/V was evicted
    queue_seconds: float
    first_token_seconds: float | None
    seconds: float


class Observer(Protocol):
    """Somebody who counts."""

    def iteration(self, *, n_rows: int, n_tokens: int, seconds: float) -> None:
        """One iteration of the model thread ended."""
        ...

    def finished(self, request: Finished) -> None:
        """One request ended, well or badly."""
        ...


class NoObserver:
    """Nobody counts."""

    def iteration(self, *, n_rows: int, n_tokens: int, seconds: float) -> None:
        """See `Observer.iteration`."""

    def finished(self, request: Finished) -> None:
        """See `Observer.finished`."""

"""What one forward pass is asked for and what it gives back, as the engine sees it.

Numpy, no torch; the model thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cache.accounting import KV
from model.points import Point
from sessions.edits import StepEdits

Floats = npt.NDArray[np.float32]
Captured = Mapping[Point, Sequence[Floats]]
"""For each point one array per captured token. Where they have one shape they lie in one array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Consecutive tokens of one session, at positions `start` and up.

    From `kv.length` on (the default) they are stepped: their keys, values and `ln_f` rows are left
    in the cache. Below it they are there already and only read again: the pass writes nothing for
    them, and what it shows as their `k`, `v` and `ln_f` is what the cache has.

    `captured` are indices into `token_ids`; the pass returns `points` there. `logits` is no point
    of a pass: `GPT2.logits` reads it from the `ln_f` rows in the cache. `edits` of a token, by its
    index, are made whether anything is captured or not.
    """

    kv: KV
    token_ids: Sequence[int]
    start: int | None = None
    points: tuple[Point, ...] = ()
    captured: Sequence[int] = ()
    edits: Mapping[int, StepEdits] = field(default_factory=dict)

    @property
    def positions(self) -> range:
        """Absolute positions of `token_ids`."""
        start = self.kv.length if self.start is None else self.start
        return range(start, start + len(self.token_ids))

    @property
    def reads_again(self) -> bool:
        """Whether its tokens are in the cache already."""
        return self.start is not None and self.start < self.kv.length

"""What one forward pass is asked for and what it gives back, as the engine sees it.

Numpy, no torch; the model thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.accounting import KV
from model.points import Point

Captured = Mapping[Point, npt.NDArray[np.float32]]  # each [captured tokens of the row, width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The next tokens of one session, to be stepped at positions `kv.length` and up.

    `captured` are indices into `token_ids`; the pass returns `points` there. `logits` is no point
    of a pass: `GPT2.logits` reads it from the `ln_f` rows that the pass leaves in the cache.
    """

    kv: KV
    token_ids: Sequence[int]
    points: tuple[Point, ...] = ()
    captured: Sequence[int] = ()

    @property
    def positions(self) -> range:
        """Absolute positions of `token_ids`."""
        return range(self.kv.length, self.kv.length + len(self.token_ids))

"""The load of a `Serve` case: the same streams whether they come over HTTP or not. Pure Python.

Open-loop: stream i begins at its own time, however the others fare. Each opens a session with a
prompt that nobody else has, then generates greedily and is told of every token, with its embedding
vector, as the API's defaults have it. The time runs from the first arrival to the last token.

No step is dropped as disturbed: here threads of one process wait for each other's cores by design,
so waiting says nothing about neighbours. A quiet machine and more rounds must do.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.cases import Serve
from bench.engines.base import token_ids

PROMPT = 31  # less than a piece of the cache: no round finds what another computed
ARRIVALS_PER_SECOND = 200.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One client: begins `at` seconds after the start."""

    at: float
    token_ids: list[int]
    n_tokens: int


def streams(case: Serve) -> Iterator[Stream]:
    """The streams of `case`, in order of arrival; the same at every call."""
    gaps, at = random.Random(0), 0.0
    for i in range(case.n_streams):
        yield Stream(at, token_ids(PROMPT, seed=i), case.n_tokens)
        at += gaps.expovariate(ARRIVALS_PER_SECOND)

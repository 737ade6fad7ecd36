"""What clients ask for: the same whether it comes over HTTP or not. Pure Python.

A `Serve` case is open-loop: stream i begins at its own time, however the others fare. Each opens a
session with a prompt that nobody else has, then generates greedily and is told of every token, with
its embedding vector, as the API's defaults have it. The time runs from the first arrival to the
last token.

In a `Capture` case all streams begin at once, in sessions that are there and are truncated
afterwards.

No step is dropped as disturbed: here threads of one process wait for each other's cores by design,
so waiting says nothing about neighbours. A quiet machine and more rounds must do.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.cases import Capture, Serve, Sweep
from bench.engines.base import token_ids
from model.config import GPT2Config
from model.points import Point, all_points, parse_points

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


def prompts(case: Capture) -> list[list[int]]:
    """What the sessions of `case` hold: nothing that two of them share."""
    return [token_ids(case.context, seed=i) for i in range(case.n_sessions)]


def patched_prompts(case: Sweep) -> tuple[list[int], list[int]]:
    """What the session of a grid holds, and what its source does."""
    return token_ids(case.n_tokens, seed=0), token_ids(case.n_tokens, seed=1)


def points_of(asked: str, config: GPT2Config) -> tuple[Point, ...]:
    """The points that a side of a `Capture` case asks for: see `Capture.asked`."""
    match asked:
        case "":
            return ()
        case "one":
            return (Point("resid_post", config.n_layer // 2),)
        case "residuals":
            return parse_points(["embedding", "resid_post.*"], config).points
        case "cheap":
            return tuple(point for point in all_points(config) if not point.costs_extra)
        case "all":
            return all_points(config)
        case _:
            raise ValueError(asked)

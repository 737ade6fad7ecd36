"""What sharing K/V costs and gains, in one of our modes. In a process of its own.

Fork: `KVCache.fork` of a session of 900 tokens, and apart from it the first write of the child,
which gets the partly filled piece that both would write to: 4 rows at 900, 31 at 927 (if pieces
are of 32 positions).

Shared prefix: one step of n forks of a prefix against one step of n sessions that hold the same
tokens in places of their own. The two take turns. Each has some tokens of its own after the prefix.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.cases import EngineSpec
from bench.driver import ATTEMPTS
from bench.engines.base import token_ids
from bench.engines.stepscope import Stepscope, build
from bench.samples import Sample, clean_median, in_turns, repeat, timed
from cache.accounting import KV

PREFIX, OWN = 800, 8
FORKED_AT = (900, 927)
COMPANIES = (16, 64)
FORKS, STEPS = 50, 10

Row = dict[str, str | float]
Pair = tuple[list[Sample], list[Sample]]


def main(spec: EngineSpec, directory: Path, n_threads: int) -> dict[str, list[Row]]:
    """The rows of one mode, by the title of their table."""
    engine = build(spec, directory, n_threads)
    return {
        "Fork": [fork_row(engine, spec.name, length) for length in FORKED_AT],
        f"A shared prefix of {PREFIX} tokens": [
            prefix_row(engine, spec.name, n) for n in COMPANIES
        ],
    }


def fork_row(engine: Stepscope, name: str, length: int) -> Row:
    """A fork, and making room for the child's first token."""
    (parent,) = engine.filled(1, token_ids(length))
    fork, first_write = _medians(lambda: _fork_samples(engine, parent))
    engine.cache.close(parent)
    return {
        "ours": name,
        "tokens": str(length),
        "fork_us": fork * 1e6,
        "first_write_us": first_write * 1e6,
    }


def _fork_samples(engine: Stepscope, parent: KV) -> Pair:
    cache, children, length = engine.cache, list[KV](), parent.length
    forks = repeat(lambda: children.append(cache.fork(parent, length)), FORKS)
    waiting = iter(children)
    writes = repeat(lambda: cache.reserve(next(waiting), length + 1), FORKS)
    engine.close_all(children)
    return forks, writes


def prefix_row(
    engine: Stepscope, name: str, n: int, *, prefix: int = PREFIX, steps: int = STEPS
) -> Row:
    """A step of `n` sessions that share `prefix` tokens, against one of `n` that share nothing."""
    apart = engine.filled(n, token_ids(prefix + OWN))
    apart_mb = engine.cache.usage().bytes_used / 1e6
    parent, *forks = _forked(engine, n, prefix)
    forks_mb = engine.cache.usage().bytes_used / 1e6 - apart_mb
    ids = token_ids(n, seed=1)
    apart_step, forks_step = _medians(lambda: _step_samples(engine, apart, forks, ids, steps))
    engine.close_all([*apart, *forks, parent])
    return {
        "ours": name,
        "sessions": str(n),
        "apart_ms": apart_step * 1000,
        "forks_ms": forks_step * 1000,
        "apart/forks": apart_step / forks_step,
        "apart_mb": apart_mb,
        "forks_mb": forks_mb,
    }


def _forked(engine: Stepscope, n: int, prefix: int) -> list[KV]:
    """A session of `prefix` tokens, and `n` forks of it with `OWN` more each and room for one."""
    (parent,) = engine.filled(1, token_ids(prefix))
    forks = [engine.cache.fork(parent, prefix) for _ in range(n)]
    for i, kv in enumerate(forks):
        engine.cache.reserve(kv, prefix + OWN + 1)
        engine.prompt(kv, token_ids(OWN, seed=i))
    return [parent, *forks]


def _step_samples(
    engine: Stepscope, apart: list[KV], forks: list[KV], ids: list[int], steps: int
) -> Pair:
    def step(sessions: list[KV]) -> Sample:
        return timed(lambda: engine.step(sessions, ids))

    sides = in_turns({"apart": partial(step, apart), "forks": partial(step, forks)}, steps)
    return sides["apart"], sides["forks"]


def _medians(measure: Callable[[], Pair]) -> tuple[float, float]:
    """Clean medians in seconds; not a number where too few were clean at every attempt."""
    one, other = list[Sample](), list[Sample]()
    for _ in range(ATTEMPTS):
        more = measure()
        one += more[0]
        other += more[1]
        medians = clean_median(one), clean_median(other)
        if None not in medians:
            break
    return medians[0] or math.nan, medians[1] or math.nan

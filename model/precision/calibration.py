"""Which of several ways to a product is fastest on this machine, by number of rows.

Libraries differ by up to two, and where one overtakes another depends on the CPU; so it is
measured, once for a shape, before the first use. Torch; the model thread.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from model.precision.base import Product

Maker = Callable[[Tensor], Product]  # of `x @ weight.T`, from weight [out, in]

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
SECONDS = 1.0  # for one shape; a start may spend two, and the last call may be a slow one
_OUT = 16384  # rows of the sample weight: fewer would fit caches that a vocabulary does not
_ROUNDS = 3
_GAIN = 0.9  # of the default's time, or less: noise must not choose


def fastest(makers: Sequence[Maker], weight: Tensor) -> Product:
    """A product with weight [out, in] that goes the fastest way for each number of rows.

    The first maker is the default. Equal shapes go equal ways as long as the process lives, so
    that a model loaded again has the same bits.
    """
    chosen = _chosen(tuple(makers), weight.shape[1])
    products = {maker: maker(weight) for maker in set(chosen)}
    by_rows = [products[chosen[_measured(rows)]] for rows in range(ROWS[-1] + 1)]
    return lambda x: by_rows[min(len(x), ROWS[-1])](x)


def _measured(rows: int) -> int:
    """Index of the largest measured number of rows up to `rows`."""
    return max(0, bisect_right(ROWS, rows) - 1)


@cache
def _chosen(makers: tuple[Maker, ...], width: int) -> tuple[Maker, ...]:
    """A maker for each of ROWS; what is in the weight does not change the time it takes."""
    sample = torch.ones(_OUT, width)
    choices = choose([maker(sample) for maker in makers], width)
    return tuple(makers[choice] for choice in choices)


@torch.inference_mode()
def choose(
    products: Sequence[Product],
    width: int,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.thread_time,
) -> list[int]:
    """The index of the fastest product for each of ROWS, for x [rows, width] float32.

    0 unless another takes at most nine tenths of product 0's time, and wherever `seconds` were over
    before all had been timed; the clock is looked at between calls. It counts this thread's own
    time: what other processes take of a busy machine would choose at random.
    """
    deadline = clock() + seconds
    choices = []
    for rows in ROWS:
        times = _times(products, torch.ones(rows, width), deadline, clock)
        best = times.index(min(times))
        choices.append(best if times[best] <= _GAIN * times[0] else 0)
    return choices


def _times(
    products: Sequence[Product], x: Tensor, deadline: float, clock: Callable[[], float]
) -> list[float]:
    """Each product's shortest time, in turns so that a busy moment meets all; 0 if time is over."""
    shortest = [math.inf] * len(products)
    for _ in range(_ROUNDS):
        for i, product in enumerate(products):
            start = clock()
            if start >= deadline:
                return [0.0] * len(products)
            product(x)
            shortest[i] = min(shortest[i], clock() - start)
    return shortest

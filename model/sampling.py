"""Choosing the next id from one row of logits. Numpy, the model thread; no torch.

The sample is the argmax of shaped logits + Gumbel noise (Gumbel 1954; Maddison et al. 2014,
section 2), and the noise is keyed by (seed, sample index, position, id). So it depends on its own
row only, never on batch mates or on what was drawn before, and a last-bit change of the logits
moves it only where two sums were that close. (Inverting a sorted cumulative distribution shifts
every later threshold instead, and flips often.)
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from model.errors import NonFiniteLogits

GREEDY_BELOW = 1e-4  # temperatures that would only scale a certain winner towards infinity

_SUM_ERROR = 1e-12  # of a sum of weights, generously: half of six equal ids is three, not four
_HEAD = 2048  # likeliest ids that are sorted before all of them are

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next id is chosen. Defaults as in the API.

    The order is bias, temperature, top_k, top_p. `seed` and `sample_index` are 0 to 2**63 - 1.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    sample_index: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    _biased: _Ids = field(init=False, compare=False, repr=False)
    _biases: _Floats = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Once per request: a dictionary of the whole vocabulary takes longer than a row's sampling.
        n = len(self.logit_bias)
        object.__setattr__(self, "_biased", np.fromiter(self.logit_bias.keys(), np.intp, n))
        object.__setattr__(self, "_biases", np.fromiter(self.logit_bias.values(), np.float64, n))

    def bias(self, shaped: _Floats) -> None:
        """Add `logit_bias` to a row [V], in place."""
        shaped[self._biased] += self._biases

    @property
    def greedy(self) -> bool:
        """Whether the likeliest id is taken, without noise."""
        return self.temperature < GREEDY_BELOW


def choose(logits: npt.NDArray[np.float32], sampling: Sampling, *, position: int) -> int:
    """The id that follows `position`, from that position's logits [V]. Ties go to the lowest id.

    Raises:
        NonFiniteLogits: NaN or infinity in the row.
    """
    _check_finite(logits)
    if sampling.greedy and not sampling.logit_bias:
        return int(logits.argmax())
    shaped, noise = _scratch.rows(len(logits))
    np.copyto(shaped, logits)
    sampling.bias(shaped)
    if sampling.greedy:
        return int(shaped.argmax())
    shaped /= sampling.temperature
    ids = _candidates(shaped, sampling)
    _uniform(sampling, position=position, out=noise)
    if ids is None:
        shaped += _gumbel(noise)
        return int(shaped.argmax())
    return int(ids[(shaped[ids] + _gumbel(noise[ids])).argmax()])


def logprobs(
    logits: npt.NDArray[np.float32], token_id: int, top_n: int
) -> tuple[float, list[tuple[int, float]]]:
    """Natural log softmax of raw logits [V]: of `token_id`, and of the `top_n` likeliest ids.

    The list is in the order (logprob descending, id ascending). Everything is finite.

    Raises:
        NonFiniteLogits: NaN or infinity in the row.
    """
    _check_finite(logits)
    row, weights = _scratch.rows(len(logits))
    np.subtract(logits, logits.max(), out=row, dtype=np.float64)
    row -= np.log(np.exp(row, out=weights).sum())
    likeliest = largest(row, min(top_n, len(row)))
    pairs = [(int(token), float(row[token])) for token in likeliest]
    return float(row[token_id]), sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def _check_finite(logits: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(logits).all():
        raise NonFiniteLogits


class _Scratch(threading.local):
    """Two rows for each thread that samples: fresh pages would cost as much as the arithmetic."""

    def __init__(self) -> None:
        self._rows = np.empty((2, 0))

    def rows(self, n_vocab: int) -> _Floats:
        if self._rows.shape[1] != n_vocab:
            self._rows = np.empty((2, n_vocab))
        return self._rows


_scratch = _Scratch()


def _candidates(shaped: _Floats, sampling: Sampling) -> _Ids | None:
    """Ids that top_k and top_p leave, ascending. None: all of them."""
    ids = None
    if sampling.top_k is not None and sampling.top_k < len(shaped):
        ids = largest(shaped, sampling.top_k)
    if sampling.top_p >= 1.0:
        return ids
    left = shaped if ids is None else shaped[ids]
    nucleus = largest(left, _nucleus_size(left, sampling.top_p))
    return nucleus if ids is None else ids[nucleus]


def _nucleus_size(shaped: _Floats, top_p: float) -> int:
    """Size of the smallest set of likeliest ids whose probabilities sum to `top_p` or more.

    Holtzman et al. 2019, section 3.1. Compared from the likely end: `1 - top_p` would round.
    Only the head is sorted where it is enough, as it mostly is: sorting all costs ten times that.
    """
    weights = shaped - shaped.max()
    np.exp(weights, out=weights)
    goal = top_p * weights.sum() * (1 - _SUM_ERROR)
    for n_head in (min(_HEAD, len(weights)), len(weights)):
        cumulative = _descending(weights, n_head).cumsum()
        if cumulative[-1] >= goal:
            return int(np.searchsorted(cumulative, goal)) + 1
    return len(weights)


def _descending(values: _Floats, k: int) -> _Floats:
    """The `k` largest values, sorted. `values` is reordered."""
    rest = len(values) - k
    values.partition(rest)
    return np.sort(values[rest:])[::-1]


def largest(values: npt.NDArray[np.floating], k: int) -> _Ids:
    """Indices, ascending, of exactly `k` largest values; among equal ones the lowest indices."""
    if k == 0:
        return np.empty(0, dtype=np.intp)
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def _uniform(sampling: Sampling, *, position: int, out: _Floats) -> None:
    """A uniform draw in [0, 1) for every id; the id is the offset in the stream.

    SFC64 draws a row in half of Philox's time, and numpy's seed sequence keeps streams apart.
    """
    key = (sampling.seed, sampling.sample_index, position)
    np.random.Generator(np.random.SFC64(key)).random(out=out)


def _gumbel(uniform: _Floats) -> _Floats:
    """Standard Gumbel noise in place of `uniform`: minus the log of exponentials. Always finite.

    `1 - u` is in (0, 1] and exact. An exponential may come out as 0; the smallest normal number
    in its place keeps its log finite.
    """
    noise = np.subtract(1.0, uniform, out=uniform)
    np.negative(np.log(noise, out=noise), out=noise)
    np.maximum(noise, np.finfo(np.float64).tiny, out=noise)
    return np.negative(np.log(noise, out=noise), out=noise)

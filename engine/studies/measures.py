"""How far apart two tensors are. Numpy in float64, any thread.

Sources: Kullback and Leibler 1951 for the divergence, in nats.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.points import Point

LOGITS = Point("logits")
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The largest differences of two tensors, and where the absolute one is."""

    absolute: float = 0.0
    relative: float = 0.0  # to the larger of the two numbers
    index: tuple[int, ...] | None = None  # None: they are equal


NO_GAP = Gap()


def gap(a: Floats, b: Floats) -> Gap:
    """Element by element. A difference with a NaN in it is infinite."""
    if np.array_equal(a, b):
        return NO_GAP
    with np.errstate(invalid="ignore", over="ignore"):
        absolute = np.abs(a.astype(np.float64) - b)
    absolute[a == b] = 0  # equal infinities
    absolute[np.isnan(absolute)] = np.inf
    scale = np.maximum(np.abs(a), np.abs(b)).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(absolute > 0, absolute / scale, 0)
    relative[np.isnan(relative)] = np.inf
    index = np.unravel_index(int(absolute.argmax()), absolute.shape)
    return Gap(
        absolute=float(absolute.max()),
        relative=float(relative.max()),
        index=tuple(map(int, index)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Two tensors as vectors. Not finite where a number in them is not."""

    l2: float  # of their difference
    norm_a: float
    norm_b: float
    cosine: float | None  # None: one of them is zero


def distance(a: Floats, b: Floats) -> Distance:
    """Of two tensors of one shape."""
    x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    with np.errstate(invalid="ignore"):
        norm_a, norm_b = float(np.linalg.norm(x)), float(np.linalg.norm(y))
        l2 = float(np.linalg.norm(x - y))
        cosine = float(x @ y) / (norm_a * norm_b) if norm_a and norm_b else None
    return Distance(l2=l2, norm_a=norm_a, norm_b=norm_b, cosine=cosine)


def kl_divergence(logits_p: Floats, logits_q: Floats) -> float:
    """KL(p || q) of the softmax of two rows of logits, in nats."""
    log_p, log_q = log_softmax(logits_p), log_softmax(logits_q)
    with np.errstate(invalid="ignore"):
        divergence = float(np.exp(log_p) @ (log_p - log_q))
    return 0.0 if divergence < 0 else divergence  # rounding; a NaN stays one


def log_softmax(logits: Floats) -> Doubles:
    """Natural log of the softmax of one row."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))

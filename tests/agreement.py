"""What "agrees with the reference" means, in one place (design: Agreement).

An element may differ by 1e-4 + 1e-5 x its size, or by 1e-4 + 1e-6 x the largest entry of its row
where that is more: trained GPT-2 has entries near 3,000, where float32 steps by 2.4e-4. Rows run
along the last axis.
"""

import numpy as np
import numpy.typing as npt

FRESH_LIMIT = 2e-5

_Floats = npt.NDArray[np.float64]


def tolerance(reference: npt.ArrayLike) -> _Floats:
    """How far each element may be from `reference`."""
    size = np.abs(np.asarray(reference, dtype=np.float64))
    largest = size.max(axis=-1, keepdims=True, initial=0.0)
    allowed: _Floats = 1e-4 + np.maximum(1e-5 * size, 1e-6 * largest)
    return allowed


def assert_agrees(
    actual: npt.ArrayLike, reference: npt.ArrayLike, *, fresh: bool = False, what: str = "tensor"
) -> None:
    """Fail where an element is out of tolerance, of another shape, or not finite.

    `fresh`: on freshly drawn weights every value is small, and 2e-5 must hold besides.
    """
    ours = np.asarray(actual, dtype=np.float64)
    theirs = np.asarray(reference, dtype=np.float64)
    assert ours.shape == theirs.shape, f"{what}: shape {ours.shape}, not {theirs.shape}"
    allowed = np.minimum(tolerance(theirs), FRESH_LIMIT) if fresh else tolerance(theirs)
    difference = np.abs(ours - theirs)
    wrong = ~(difference <= allowed)  # NaN compares false, and so is wrong
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements disagree, first at {place}: "
            f"{ours[place]} instead of {theirs[place]}, tolerance {allowed[place]}"
        )


def assert_same_greedy(actual: npt.ArrayLike, reference: npt.ArrayLike) -> None:
    """Fail where a row [..., V] picks another id though the reference's choice was clear.

    Clear: its two largest logits differ by more than twice the tolerance.
    """
    ours = np.asarray(actual, dtype=np.float64)
    theirs = np.asarray(reference, dtype=np.float64)
    assert ours.shape == theirs.shape
    top_two = np.sort(np.partition(theirs, -2)[..., -2:])
    margin = top_two[..., 1] - top_two[..., 0]
    best = theirs.argmax(axis=-1)
    allowed = np.take_along_axis(tolerance(theirs), best[..., None], axis=-1)[..., 0]
    wrong = (margin > 2 * allowed) & (ours.argmax(axis=-1) != best)
    assert not wrong.any(), f"another greedy id at rows {np.argwhere(wrong).tolist()}"

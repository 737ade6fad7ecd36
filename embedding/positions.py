"""Absolute positions. Pure Python, any thread.

`p = past_length + t`: a position is never restarted, wrapped or shifted (Radford et al. 2019,
section 2.3; openai/gpt-2 `src/model.py`, `positions_for`).
"""

from collections.abc import Sequence

from embedding.errors import PositionOverflow


def positions_for(past_length: int, n_new: int, n_ctx: int) -> range:
    """Positions of `n_new` tokens that follow `past_length` cached ones.

    Raises:
        PositionOverflow: one of them would have no row in `wpe`. Exactly `n_ctx` fits.
    """
    assert past_length >= 0, "a negative position would count from the end of `wpe`"
    if past_length + n_new > n_ctx:
        raise PositionOverflow(past_length=past_length, n_new=n_new, n_ctx=n_ctx)
    return range(past_length, past_length + n_new)


def check_positions(positions: Sequence[int], n_ctx: int) -> None:
    """Refuse positions that are no row of `wpe`.

    Raises:
        PositionOverflow: names the largest.
    """
    if not positions:
        return
    assert min(positions) >= 0, "a negative position would count from the end of `wpe`"
    if max(positions) >= n_ctx:
        raise PositionOverflow(past_length=max(positions), n_new=1, n_ctx=n_ctx)

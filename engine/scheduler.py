"""Who steps how many tokens in the next iteration. Pure Python, no torch; the model thread.

There is no prefill phase and no decode phase: a job has tokens, some of which are cached, and the
work is the rest (the idea is vLLM's). A job with one token to do gets it in every iteration; jobs
with more share a budget of `prefill_chunk` tokens, so that nobody waits longer for a neighbour's
prompt than one chunk takes. Tokens whose rows are in the cache already cost no step but a record
each, and have a budget of their own for the same reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job could do now: `todo` tokens, of which its reader has room for `chunk`.

    `found`: their rows are in the cache already.
    """

    todo: int
    chunk: int
    found: bool = False


def share(
    demands: Sequence[Demand], *, max_rows: int, prefill_chunk: int, found_chunk: int
) -> list[int]:
    """Tokens for each demand, first come first served; the caller puts those served last.

    At most `max_rows` are above 0; those of jobs with several tokens to do sum to at most
    `prefill_chunk`, and those that are found to at most `found_chunk`.
    """
    granted = [0] * len(demands)
    rows, budgets = max_rows, {False: prefill_chunk, True: found_chunk}
    for i, demand in enumerate(demands):
        if rows == 0:
            break
        if demand.todo == 1 and not demand.found:
            granted[i] = 1
        else:
            granted[i] = min(demand.todo, demand.chunk, budgets[demand.found])
            budgets[demand.found] -= granted[i]
        rows -= granted[i] > 0
    return granted

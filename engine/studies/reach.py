"""Interventions as far as a branch is stepped. Pure Python, any thread."""

from collections.abc import Iterable
from dataclasses import replace

from sessions.edits import Intervention


def up_to(interventions: Iterable[Intervention], stop: int) -> tuple[Intervention, ...]:
    """What they do before position `stop`, where the branch ends: those after it change nothing."""
    clipped = []
    for one in interventions:
        if one.spans is not None:
            spans = tuple(
                (first, stop if end is None else min(end, stop))
                for first, end in one.spans
                if first < stop
            )
            one = replace(one, spans=spans)
        if one.spans != ():
            clipped.append(one)
    return tuple(clipped)

"""Whether what is cached is what a full pass gives. The event loop; the numbers on workers.

Both are streams and are read in step, so that memory stays bounded and other sessions go on.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from engine.commands import Read
from engine.events import Usage
from engine.studies.flow import Pairs, Probing, in_step
from engine.studies.measures import LOGITS, NO_GAP, Gap, gap
from model.config import GPT2Config
from model.points import Point


def verified_points(config: GPT2Config) -> tuple[Point, ...]:
    """What a cached path leaves or leads to: compared where nothing else is asked for."""
    layers = range(config.n_layer)
    blocks = [Point(name, layer) for layer in layers for name in ("k", "v", "resid_post")]
    return tuple(sorted([Point("embedding"), *blocks, Point("ln_f"), LOGITS]))


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest differences of one point over positions. `position`: of the absolute one."""

    gap: Gap = NO_GAP
    position: int | None = None

    def with_one(self, other: Gap, position: int) -> "Worst":
        """These, or those at one position more."""
        larger = other.absolute > self.gap.absolute
        gap, where = (other, position) if larger else (self.gap, self.position)
        relative = max(self.gap.relative, other.relative)
        return Worst(replace(gap, relative=relative), where)


@dataclass(slots=True)
class Verification:
    """What was found so far. `greedy_equal` is None where logits are not compared."""

    worst: dict[Point, Worst]
    greedy_equal: bool | None
    usage: Usage = field(default_factory=Usage)  # of reading what is cached

    def take(self, pairs: Pairs) -> None:
        """Compare records of the cached and of the full pass, at the same positions. Any thread."""
        for cached, fresh in pairs:
            for point, worst in self.worst.items():
                found = gap(cached.points[point], fresh.points[point])
                self.worst[point] = worst.with_one(found, cached.position)
            if self.greedy_equal and LOGITS in self.worst:
                best, expected = (np.argmax(one.points[LOGITS]) for one in (cached, fresh))
                self.greedy_equal = bool(best == expected)


async def verify(engine: Probing, command: Read) -> Verification:
    """Compare what `command` reads, as a stream, with a pass that reads nothing cached.

    Its positions are given one by one; without any there is no difference.

    Raises:
        EngineError, SessionError: refused or failed.
    """
    points = command.capture.points
    found = Verification(dict.fromkeys(points, Worst()), True if LOGITS in points else None)
    found.usage, _ = await in_step(engine, command, replace(command, fresh=True), found.take)
    return found

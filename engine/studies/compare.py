"""Two sessions, position by position. The event loop; the numbers on workers."""

from dataclasses import dataclass, field

from engine.commands import Read
from engine.events import Usage
from engine.studies.flow import Pairs, Probing, in_step
from engine.studies.measures import LOGITS, Distance, Floats, distance, kl_divergence
from model.points import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One point at one position. Of logits also KL(a || b) and KL(b || a), in nats."""

    distance: Distance
    kl_ab: float | None = None
    kl_ba: float | None = None


@dataclass(slots=True)
class Comparison:
    """What was found so far, by position. `usage`: of reading a and b."""

    points: dict[Point, list[Difference]]
    usage: tuple[Usage, Usage] = field(default_factory=lambda: (Usage(), Usage()))

    def take(self, pairs: Pairs) -> None:
        """Compare records of the two at the same positions. Any thread."""
        for a, b in pairs:
            for point, row in self.points.items():
                row.append(_difference(point, a.points[point], b.points[point]))


def _difference(point: Point, a: Floats, b: Floats) -> Difference:
    between = distance(a, b)
    if point != LOGITS:  # of some of them the softmax would be another one
        return Difference(distance=between)
    return Difference(distance=between, kl_ab=kl_divergence(a, b), kl_ba=kl_divergence(b, a))


async def compare(engine: Probing, a: Read, b: Read) -> Comparison:
    """Compare two reads, which are streams of the same points and positions, given one by one.

    Raises:
        EngineError, SessionError: refused or failed.
    """
    found = Comparison({point: [] for point in a.capture.points})
    found.usage = await in_step(engine, a, b, found.take)
    return found

"""What the interventions of a request mean in this model. The event loop; many numbers on a worker.

    InterventionBody -- plan_of --> Planned -- values.resolve --> sessions.edits.Intervention

Here is found whatever the body alone can be wrong in, before a text costs anything.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from model.config import GPT2Config
from model.errors import UnknownPoint
from model.points import Point, parse_point
from server.errors import InvalidRequest, blaming
from server.inputs import parse_spans
from server.interventions.bodies import InterventionBody, ValueBody
from server.interventions.numbers import parse_data
from sessions.edits import Edit, Intervention, Op, Span, Value, within

FIELD = "interventions"
MAX_SPANS = 1024
"""Of one request's positions and keys: each step asks all of them whether it is meant."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that was sent before, by its id."""

    vector_id: str


@dataclass(frozen=True, slots=True)
class Weights:
    """A value that is a parameter of the model, or a row of one."""

    name: str


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that a session's step has."""

    session_id: str
    position: int
    point: Point


Source = Value | Kept | Weights | Computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One intervention, whose value may still have to be fetched."""

    place: str  # in the request's list: "[2]"
    point: Point
    op: Op
    scale: float
    spans: tuple[Span, ...] | None
    keys: tuple[Span, ...]
    shape: tuple[int, ...]  # of its value
    source: Source | None

    @property
    def n_bytes(self) -> int:
        """Of its value."""
        return _FLOAT_BYTES * prod(self.shape) if self.source else 0

    @property
    def heads(self) -> Sequence[int]:
        """Those of a point that has some."""
        return self.point.units or range(self.shape[0])

    def covers(self, position: int) -> bool:
        """Whether it edits the step at `position`."""
        return self.spans is None or within(self.spans, position)

    def first_from(self, start: int) -> int | None:
        """The first position from `start` on that it edits."""
        if self.spans is None:
            return start
        ahead = (max(start, first) for first, stop in self.spans if stop is None or stop > start)
        return min(ahead, default=None)

    def made(self, value: Value | None = None) -> Intervention:
        """What it comes to with its value; without, what can be checked before that is fetched."""
        edit = Edit(
            point=str(self.point), op=self.op, value=value, scale=self.scale, keys=self.keys
        )
        return Intervention(edit=edit, spans=self.spans)


async def plan_of(bodies: Sequence[InterventionBody], config: GPT2Config) -> list[Planned]:
    """Read interventions.

    Raises:
        Blamed: one of them cannot be made in this model.
        InvalidRequest: they name too many spans.
    """

    def work() -> list[Planned]:
        return [planned(body, config, place=f"[{i}]") for i, body in enumerate(bodies)]

    heavy = any(body.value and body.value.data is not None for body in bodies)
    plan = await asyncio.to_thread(work) if heavy else work()
    if sum(len(one.spans or ()) + len(one.keys) for one in plan) > MAX_SPANS:
        raise InvalidRequest(f"positions and keys are over {MAX_SPANS} spans", param=FIELD)
    return plan


def planned(
    body: InterventionBody, config: GPT2Config, *, place: str = "", read: Value | None = None
) -> Planned:
    """Read one intervention. Any thread. `read`: the numbers of its `data`, where they are known.

    Raises:
        Blamed: it cannot be made in this model.
    """
    with blaming(FIELD, (InvalidRequest, UnknownPoint), place=place):
        point = _editable(body.point, config)
        if body.op == "mask" and point.name != "scores":
            raise InvalidRequest(f"a mask is of scores, not of {point}")
        spans = None if body.positions is None else parse_spans(body.positions, config.n_ctx)
        grows = "key" in point.axes and body.value is not None
        shape = point.shape(config, _only(spans, point) if grows else 0)
        return Planned(
            place=place,
            point=point,
            op=body.op,
            scale=body.factor,
            spans=spans,
            keys=parse_spans(body.keys, config.n_ctx) if body.keys is not None else (),
            shape=shape,
            source=_source(body.value, point, shape, config, read) if body.value else None,
        )


def check_masks(plan: Iterable[Planned], positions: range) -> None:
    """See that masks, all taken together, leave every step a key to attend to in every head.

    The step at p sees keys 0 to p: of those that are edited alike, the first is left the fewest.

    Raises:
        Blamed: one hides the last that is left.
    """
    scores = [one for one in plan if one.point.name == "scores" and one.op in ("mask", "replace")]
    hidden = [_bits(one.keys) for one in scores]
    spans = chain.from_iterable(one.spans or () for one in scores)
    edges = {edge for edge in (positions.start, *chain.from_iterable(spans)) if edge is not None}
    for position in filter(positions.__contains__, sorted(edges)):
        made = [pair for pair in zip(scores, hidden, strict=True) if pair[0].covers(position)]
        _check_left(made, position)


def _check_left(made: Iterable[tuple[Planned, int]], position: int) -> None:
    """The same of one step, with the keys that each edit hides, a bit for each."""
    seen = (2 << position) - 1
    left: dict[tuple[int | None, int], int] = {}  # by layer and head
    for one, bits in made:
        for head in one.heads:
            place = one.point.layer, head
            left[place] = left.get(place, seen) & ~bits if one.op == "mask" else seen
            if not left[place]:
                with blaming(FIELD, InvalidRequest, place=one.place):
                    raise InvalidRequest(f"it leaves the step at {position} no key to attend to")


def _bits(keys: Iterable[Span]) -> int:
    """A bit for each key of spans that are apart; without an end, infinitely many."""
    return sum((-1 << first) - (0 if stop is None else -1 << stop) for first, stop in keys)


def check_shape(given: tuple[int, ...], point: Point, shape: tuple[int, ...]) -> None:
    """See that a value has the shape of its point.

    Raises:
        InvalidRequest: it has another.
    """
    if given != shape:
        raise InvalidRequest(f"its value has shape {list(given)}, and {point} has {list(shape)}")


def _editable(name: str, config: GPT2Config) -> Point:
    point = parse_point(name, config)
    if not point.is_editable:
        raise InvalidRequest(f"{point} is derived and read-only: edit ln_f, or what is before it")
    return point


def _only(spans: tuple[Span, ...] | None, point: Point) -> int:
    if spans is None or len(spans) != 1 or spans[0][1] != spans[0][0] + 1:
        raise InvalidRequest(
            f"{point} has a number for each key, so its value fits one position: give that"
        )
    return spans[0][0]


def _source(
    value: ValueBody, point: Point, shape: tuple[int, ...], config: GPT2Config, read: Value | None
) -> Source:
    if value.vector is not None:
        return Kept(value.vector)
    if value.param is not None:
        return Weights(value.param)
    if value.session is None or value.position is None:
        return _inline(value, point, shape, read)
    if value.position >= config.n_ctx:
        raise InvalidRequest(f"position {value.position} is none of 0 to {config.n_ctx - 1}")
    there = point if value.point is None else parse_point(value.point, config)
    check_shape(there.shape(config, value.position), point, shape)
    return Computed(value.session, value.position, there)


def _inline(value: ValueBody, point: Point, shape: tuple[int, ...], read: Value | None) -> Value:
    if value.shape is not None:
        check_shape(tuple(value.shape), point, shape)
    if value.axes is not None and tuple(value.axes) != point.axes:
        raise InvalidRequest(f"the axes of {point} are {', '.join(point.axes)}")
    return read if read and read.shape == shape else parse_data(value.data, shape)

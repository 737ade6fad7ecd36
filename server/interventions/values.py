"""The numbers of interventions, from wherever they are. The event loop.

All of them are known before the first step is made, and none is fetched again: what is edited with
them keeps them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.commands import Capture, Read, ReplyLimit
from engine.errors import EngineError
from model.batch import Floats
from model.points import Point
from server.errors import InvalidRequest, VectorNotFound, blaming
from server.host import Service
from server.interventions.numbers import value_of
from server.interventions.plan import FIELD, Computed, Kept, Planned, Weights, check_shape
from server.parameters import parameter
from sessions.edits import Intervention, Value
from sessions.errors import SessionError

_BLAMED = (InvalidRequest, VectorNotFound, SessionError, EngineError)

Found = dict[Weights | Computed, Value]
"""What was fetched so far, and what is fetched now."""


async def resolve(service: Service, plan: Sequence[Planned]) -> tuple[Intervention, ...]:
    """The interventions of a plan, with their numbers.

    Raises:
        Blamed: a value is not there, or has another shape than its point.
        Overloaded: requests hold too many bytes.
    """
    with service.holding(value_bytes(plan)):
        return await resolve_held(service, plan, {})


async def resolve_held(
    service: Service, plan: Sequence[Planned], found: Found
) -> tuple[Intervention, ...]:
    """The same, where the caller holds `value_bytes`. Each source is asked once: see `found`.

    Raises:
        Blamed: a value is not there, or has another shape than its point.
    """
    await _compute(service, plan, found)
    return tuple(_intervention(service, one, found) for one in plan)


def value_bytes(plan: Iterable[Planned]) -> int:
    """Bytes of all values of a plan."""
    return sum({one.source: one.n_bytes for one in plan}.values())


def _intervention(service: Service, one: Planned, found: Found) -> Intervention:
    with blaming(FIELD, _BLAMED, place=one.place):
        value = _value(service, one, found)
        if value is not None:
            check_shape(value.shape, one.point, one.shape)
            if one.op == "project" and not np.frombuffer(value.data, dtype="<f4").any():
                raise InvalidRequest("a projection needs a direction, and its value is zero")
    return one.made(value)


def _value(service: Service, one: Planned, found: Found) -> Value | None:
    match one.source:
        case Kept(vector_id):
            return service.vectors.get(vector_id).value
        case Weights(name) as weights:
            if weights not in found:
                tensor = parameter(service.engine.model, name)
                check_shape(tuple(tensor.shape), one.point, one.shape)
                found[weights] = value_of(tensor.numpy())
            return found[weights]
        case Computed() as computed:
            return found[computed]
        case inline_or_none:
            return inline_or_none


async def _compute(service: Service, plan: Iterable[Planned], found: Found) -> None:
    """What is asked of sessions, as their last commits left them: each is read once."""
    wanted = defaultdict[str, dict[Computed, str]](dict)
    for one in plan:
        if isinstance(one.source, Computed) and one.source not in found:
            wanted[one.source.session_id].setdefault(one.source, one.place)
    for places in wanted.values():
        await _read(service, places, found)


async def _read(service: Service, places: Mapping[Computed, str], found: Found) -> None:
    """Values of one session; `places` says where in the request each is asked for."""
    first = next(iter(places))
    with blaming(FIELD, _BLAMED, place=places[first]):
        past_length = service.engine.view(first.session_id).session.past_length
    for one, place in places.items():
        with blaming(FIELD, InvalidRequest, place=place):
            _check_committed(one, past_length)
    with blaming(FIELD, _BLAMED, place=places[first]):
        rows = await _rows(service, first.session_id, places)
    for one, place in places.items():
        with blaming(FIELD, InvalidRequest, place=place):
            found[one] = value_of(rows[one.position][one.point])


def _check_committed(one: Computed, past_length: int) -> None:
    if one.position >= past_length:
        raise InvalidRequest(
            f"position {one.position} of {one.session_id!r} is not committed: "
            f"its past_length is {past_length}"
        )


async def _rows(
    service: Service, session_id: str, wanted: Iterable[Computed]
) -> dict[int, Mapping[Point, Floats]]:
    """Points by position."""
    capture = Capture(
        points=tuple(sorted({one.point for one in wanted})),
        positions=frozenset(one.position for one in wanted),
    )
    with service.answers.lease() as room:
        limit = ReplyLimit(
            bytes_per_record=sum(point.n_bytes(service.facts.config) for point in capture.points),
            bare_bytes_per_record=0,
            max_bytes=service.settings.max_response_bytes,
            hold=room.grow,
        )
        command = Read(session_id=session_id, capture=capture, reply_limit=limit)
        async with service.engine.read(command) as reply:
            done = await reply.result()
    return {record.position: record.points for record in done.records}

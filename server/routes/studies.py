"""`/verify`, what is cached against a full pass; `/compare`, two sessions. The event loop."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from fastapi import APIRouter, Response

from engine.commands import Capture, Read
from engine.errors import PositionsOutOfRange
from engine.studies.compare import Comparison, Difference, compare
from engine.studies.measures import LOGITS
from engine.studies.verify import Verification, Worst, verified_points, verify
from model.config import GPT2Config
from model.points import Point, Selection, parse_points
from server.answers import documented
from server.desk import Route, SessionId, TheService, json_when_done
from server.errors import AnswerTooLarge, InvalidRequest, blaming
from server.host import Service
from server.inputs import committed_positions
from server.streaming import WholeAnswer, grouped
from server.studies import answers
from server.studies.bodies import CompareBody, VerifyBody
from server.wire import dumps, members, usage_json

router = APIRouter(prefix="/v1", tags=["inside"], route_class=Route)

_ALL_OF_IT = VerifyBody()
_ROW_BYTES = 6 * 26  # of one point at one position: numbers in JSON, with what separates them


@router.post("/sessions/{session_id}/verify", **documented(answers.Verified))
async def verify_session(
    service: TheService, session_id: SessionId, body: VerifyBody = _ALL_OF_IT
) -> Response:
    """Compare what the cached path left with a full pass that reads nothing cached."""
    engine, life = service.engine, ExitStack()
    past_length = engine.view(session_id).session.past_length
    selection = _verified(body, service.facts.config)
    command = _read(session_id, selection, committed_positions(body.positions, past_length))
    life.enter_context(engine.using(session_id))

    async def work() -> dict[str, Any]:
        with blaming("positions", PositionsOutOfRange):
            found = await verify(engine, command)
        return _verified_json(past_length, found) | _aliases(selection)

    return json_when_done(service, work, life)


@router.post("/compare", **documented(answers.Compared))
async def compare_sessions(service: TheService, body: CompareBody) -> Response:
    """Compare two sessions, position by position."""
    engine = service.engine
    selection = _measured(body.points, service.facts.config)
    shorter = min(engine.view(one).session.past_length for one in (body.a, body.b))
    positions = committed_positions(body.positions, shorter)
    n_bytes = len(selection.points) * len(positions) * _ROW_BYTES
    commands = [_read(one, selection, positions) for one in (body.a, body.b)]
    with ExitStack() as life:
        life.enter_context(_room(service, n_bytes))
        for one in (body.a, body.b):
            life.enter_context(engine.using(one))

        async def work() -> list[bytes]:
            with blaming("positions", PositionsOutOfRange):
                found = await compare(engine, *commands)
            head = _compared_head(body, positions, found) | _aliases(selection)
            return await asyncio.to_thread(lambda: [*grouped(_compared_json(head, found))])

        return WholeAnswer(work, life=life.pop_all(), write_timeout=service.settings.write_timeout)


def _room(service: Service, n_bytes: int) -> AbstractContextManager[object]:
    max_bytes = service.settings.max_response_bytes
    if n_bytes > max_bytes:
        raise AnswerTooLarge(n_bytes=n_bytes, max_bytes=max_bytes, param="points")
    return service.holding(n_bytes)


def _read(session_id: str, selection: Selection, positions: Sequence[int]) -> Read:
    capture = Capture(points=selection.points, positions=frozenset(positions))
    return Read(session_id=session_id, capture=capture, atomic=False)


def _verified(body: VerifyBody, config: GPT2Config) -> Selection:
    if body.points is None:
        return Selection(verified_points(config), {})
    return _measured(body.points, config)


def _measured(names: Sequence[str], config: GPT2Config) -> Selection:
    selection = parse_points(names, config)
    for point in selection.points:
        if point.name == "lens":
            raise InvalidRequest(f"{point} has ids, which have no difference", param="points")
    return selection


def _aliases(selection: Selection) -> dict[str, Any]:
    return {"aliases": dict(selection.aliases)} if selection.aliases else {}


def _verified_json(past_length: int, found: Verification) -> dict[str, Any]:
    worst = {str(point): one for point, one in found.worst.items()}
    return {
        "object": "verify",
        "past_length": past_length,
        "max_abs_diff": {name: one.gap.absolute for name, one in worst.items()},
        "max_rel_diff": {name: one.gap.relative for name, one in worst.items()},
        "where": {name: _where(one) for name, one in worst.items()},
        "greedy_equal": found.greedy_equal,
        "usage": usage_json(found.usage),
    }


def _where(worst: Worst) -> dict[str, Any] | None:
    if worst.gap.index is None:
        return None
    return {"position": worst.position, "index": worst.gap.index}


def _compared_head(
    body: CompareBody, positions: Sequence[int], found: Comparison
) -> dict[str, Any]:
    a, b = found.usage
    return {
        "object": "comparison",
        "a": body.a,
        "b": body.b,
        "positions": positions,
        "usage": {"a": usage_json(a), "b": usage_json(b)},
    }


def _compared_json(head: Mapping[str, Any], found: Comparison) -> Iterator[bytes]:
    """Point by point, because one call of orjson keeps every other thread from the interpreter."""
    yield dumps(head)[:-1] + b',"points":'
    rows = found.points.items()
    yield from members({str(point): _row_json(point, row) for point, row in rows})
    yield b"}"


def _row_json(point: Point, row: Sequence[Difference]) -> Iterator[bytes]:
    told: dict[str, Any] = {
        name: [getattr(one.distance, name) for one in row]
        for name in ("l2", "norm_a", "norm_b", "cosine")
    }
    if point == LOGITS:
        told |= {"kl_ab": [one.kl_ab for one in row], "kl_ba": [one.kl_ba for one in row]}
    yield dumps(told)

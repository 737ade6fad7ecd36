"""`/v1/sessions/{id}/sweep`: one edit in many places. The event loop; plans and JSON on workers."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, aclosing, suppress
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.commands import Capture
from engine.errors import EngineError
from engine.studies.sweep import Readout
from model.points import parse_points
from server.answers import documented
from server.desk import Route, SessionId, TheService, form_of, record_stream
from server.errors import AnswerTooLarge, InvalidRequest
from server.host import Service
from server.inputs import Report, new_report
from server.interventions.plan import Planned
from server.interventions.values import value_bytes
from server.problems import problem
from server.streaming import Batch, Ending, Source, WholeAnswer, grouped
from server.studies.answers import Swept
from server.studies.bodies import SweepBody
from server.studies.sweeping import RunningSweep, SweepPlan, guarded, source_of
from server.studies.template import FIELD, grid_of, plan_cells
from server.wire import Message
from sessions.errors import SessionError
from sessions.session import Session

router = APIRouter(prefix="/v1/sessions", tags=["inside"], route_class=Route)


@router.post("/{session_id}/sweep", **documented(Swept, streams=True))
async def sweep_session(
    service: TheService, request: Request, session_id: SessionId, body: SweepBody
) -> Response:
    """Branch at each place of a grid, edit there, and see what becomes of a later position.

    The session is not changed, and no branch is kept.
    """
    config = service.facts.config
    session = service.engine.view(session_id).session
    at = _at(body, session)
    selection = parse_points(body.points, config)
    capture = Capture(points=selection.points, positions=frozenset([at]))
    form = form_of(request, stream=body.stream)
    report = new_report(selection, capture, form, body.encoding_format, config)
    grid = grid_of(body.axes, config, session.past_length)
    answer_bytes = report.bytes_per_record * (grid.n_cells + 2)
    _check_size(service, answer_bytes, "the answer", "points")
    plan = await asyncio.to_thread(plan_cells, body.intervention, grid, config)
    _check_committed(plan, session)
    _check_size(service, value_bytes(plan), "the values", FIELD)
    guard = guarded(service, session, at + 1)
    sweep = SweepPlan(
        readout=Readout(guard=guard, points=selection.points, at=at),
        grid=grid,
        plan=plan,
        source=source_of(service, plan, at),
        follows_source=body.at < 0,
    )
    return _answer(service, sweep, report, answer_bytes)


def _at(body: SweepBody, session: Session) -> int:
    at = session.past_length - 1 if body.at < 0 else body.at
    if not 0 <= at < session.past_length:
        raise InvalidRequest(
            f"position {body.at} is not committed: past_length is {session.past_length}", param="at"
        )
    return at


def _check_size(service: Service, n_bytes: int, what: str, param: str) -> None:
    max_bytes = service.settings.max_response_bytes
    if n_bytes > max_bytes:
        raise AnswerTooLarge(n_bytes=n_bytes, max_bytes=max_bytes, what=what, param=param)


def _check_committed(plan: Iterable[Planned], session: Session) -> None:
    for one in plan:
        for first, stop in one.spans or ():
            last = first if stop is None else stop - 1
            if last >= session.past_length:
                raise InvalidRequest(
                    f"position {last} is not committed: past_length is {session.past_length}",
                    param=FIELD,
                )


def _answer(service: Service, sweep: SweepPlan, report: Report, n_bytes: int) -> Response:
    """`n_bytes`: of the answer, which is one record; the values are held as long."""
    with ExitStack() as life:
        life.enter_context(service.holding(n_bytes))
        life.enter_context(service.holding(value_bytes(sweep.plan)))
        life.enter_context(service.engine.using(sweep.readout.session.id))
        if sweep.source is not None:
            life.enter_context(service.engine.using(sweep.source.session.id))
        if report.form.streams:
            return _stream(service, sweep, report, n_bytes, life.pop_all())
        return _json(service, sweep, report, life.pop_all())


def _json(
    service: Service, sweep: SweepPlan, report: Report, life: AbstractContextManager[object]
) -> Response:
    async def work() -> list[bytes]:
        running = await sweep.begin(service)
        async with aclosing(running.counts()) as counts:
            async for _count in counts:
                pass
        message = running.message(report)
        return await asyncio.to_thread(lambda: [*grouped(message.json_parts(report.encoding))])

    return WholeAnswer(work, life=life, write_timeout=service.settings.write_timeout)


def _stream(
    service: Service,
    sweep: SweepPlan,
    report: Report,
    n_bytes: int,
    life: AbstractContextManager[object],
) -> Response:
    stream = _Stream(service, sweep, report)
    source = Source(started=stream.started, pieces=stream.pieces, failed=stream.failed)
    return record_stream(service, source, report, life, largest_record=n_bytes)


class _Stream:
    """A sweep as records: how far it is, then the grid, then `done`."""

    _running: RunningSweep

    def __init__(self, service: Service, sweep: SweepPlan, report: Report) -> None:
        self._service = service
        self._sweep = sweep
        self._report = report

    async def started(self) -> None:
        """Whatever can be refused before a cell is stepped is."""
        self._running = await self._sweep.begin(self._service)

    async def pieces(self) -> AsyncGenerator[Batch | Ending, None]:
        """A record for each cell, and the grid."""
        total = self._sweep.grid.n_cells
        try:
            async with aclosing(self._running.counts()) as counts:
                async for done in counts:
                    yield Batch([Message({"object": "progress", "done": done, "total": total})])
        except (EngineError, SessionError) as error:
            yield Ending(await self.failed(error), failed=True)
            return
        yield Batch([self._running.message(self._report)])
        yield Ending({"object": "done", "session": self._session(), "usage": self._running.usage})

    async def failed(self, error: Exception) -> Mapping[str, Any]:
        """The record that ends a stream badly."""
        return {"error": problem(error).error, "session": self._session()}

    def _session(self) -> dict[str, Any] | None:
        """The session, which may be gone meanwhile."""
        with suppress(SessionError):
            view = self._service.engine.view(self._sweep.readout.session.id)
            return self._service.wire.session(view)
        return None

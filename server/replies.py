"""What the engine replies to a request that steps, as an answer of its form. The event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from fastapi import Response

from engine.commands import ReplyLimit
from engine.events import Done, Failed, Progress
from engine.reply import Reply
from server.desk import record_stream
from server.host import Service
from server.inputs import Report
from server.negotiation import Form
from server.problems import problem
from server.streaming import Batch, Ending, Source, WholeAnswer, steps_json
from server.tensors import stacked
from server.wire import usage_json
from sessions.errors import SessionError


def answer_steps(
    service: Service,
    session_id: str,
    report: Report,
    begin: Callable[[ReplyLimit | None], Reply],
    *,
    opens: bool = False,
) -> Response:
    """What `begin`'s reply brings, in the form that was asked for.

    Until the answer's last byte the session does not expire and the answer's room is held; the work
    does not outlive it. `opens`: the steps are of a new session, which is there once all of them
    are made; until then their records are held, in a stream too.
    """
    with ExitStack() as life:
        room = life.enter_context(service.answers.lease())
        life.enter_context(service.engine.using(session_id))
        bound = report.bound if opens else report.limit
        reply = begin(bound(service.settings.max_response_bytes, room.grow))
        life.callback(reply.cancel)
        changed = None if opens else session_id
        return _steps_response(service, changed, reply, report, life.pop_all())


def _steps_response(
    service: Service, session_id: str | None, reply: Reply, report: Report, life: ExitStack
) -> Response:
    status = 200 if session_id else 201
    if report.form.streams:
        source = _source(service, session_id, reply, report)
        largest = report.bytes_per_record
        return record_stream(service, source, report, life, largest_record=largest, status=status)

    async def work() -> list[bytes]:
        done = await reply.result()
        life.enter_context(service.engine.using(done.session.id))
        session = service.wire.session(service.engine.view_of(done.session))
        head = {**report.head, "session": session}
        tail = {"usage": usage_json(done.usage), **report.aliases}
        if report.form is Form.STACKED:
            points, config = report.capture.points, service.facts.config
            stack = partial(stacked, done.records, points, head | tail, config)
            return [await asyncio.to_thread(stack)]
        return await steps_json(
            head,
            done.records,
            tail,
            wire=service.wire,
            encoding=report.encoding,
            bytes_per_record=report.bytes_per_record,
        )

    return WholeAnswer(
        work,
        life=life,
        write_timeout=service.settings.write_timeout,
        form=report.form,
        status=status,
    )


def _source(service: Service, session_id: str | None, reply: Reply, report: Report) -> Source:
    """`session_id` is the session whose length is told after a fault; None: it was not there."""

    async def failed(error: Exception) -> Mapping[str, Any]:
        """The length is told after the work has ended: it would go on otherwise."""
        reply.cancel()
        async for _event in reply:
            pass
        session = None
        with suppress(SessionError):  # it may be gone meanwhile
            session = session_id and service.wire.session(service.engine.view(session_id))
        return {"error": problem(error).error, "session": session}

    return Source(
        started=reply.started, pieces=lambda: _pieces(service, reply, report), failed=failed
    )


async def _pieces(
    service: Service, reply: Reply, report: Report
) -> AsyncGenerator[Batch | Ending, None]:
    """The engine's events as what is sent."""
    async for event in reply:
        if isinstance(event, Progress):
            yield Batch(event.records)
            continue
        if isinstance(event, Done) and event.records:
            yield Batch(event.records)
        yield Ending(_terminal(service, event, report), failed=isinstance(event, Failed))


def _terminal(service: Service, event: Done | Failed, report: Report) -> Mapping[str, Any]:
    session = event.session and service.wire.session(service.engine.view_of(event.session))
    if isinstance(event, Failed):
        return {"error": problem(event.error).error, "session": session}
    return {
        **report.head,
        "object": "done",
        "session": session,
        "usage": usage_json(event.usage),
        **report.aliases,
    }

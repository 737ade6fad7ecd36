"""The engine as the server sees it: sessions in view, requests, replies. The event loop.

What may begin is checked at once (`engine.admission`); then typed messages go one way and events
come back.

    server -> Engine (event loop) -> Inbox -> ModelThread -> LogWriter (log thread)
                 ^                                               |
                 +---------- deliveries, once per iteration -----+
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import structlog

from cache.kv import KVCache
from embedding.tokenizer import END_OF_TEXT, Tokenizer
from engine.admission import Admission
from engine.commands import Append, Capture, Fork, Generate, Open, Truncate
from engine.errors import Drained
from engine.generation import Generation
from engine.inbox import EndAll, ForgetSession, Inbox, OpenIdle, RunJob, TruncateTo
from engine.job import Job
from engine.limits import Limits
from engine.model_thread import ModelThread
from engine.protocol import Model, NoObserver, Observer
from engine.reply import Reply
from engine.requests import Requests
from engine.views import SessionView, Stats, ViewPage
from engine.writer import LogWriter
from sessions.log import SessionLog
from sessions.registry import Registry
from sessions.session import Parent, Session

logger = structlog.get_logger()

_SWEEP_SECONDS = 1.0
_LAST_WORDS_SECONDS = 1.0  # for the terminal events of jobs that a shutdown ends
_STOP_SECONDS = 2.0  # for the step that the model thread is in


class Engine:
    """Sessions over one model. Made inside the running loop, which becomes its own."""

    def __init__(
        self,
        *,
        model: Model,
        cache: KVCache,
        tokenizer: Tokenizer,
        log: SessionLog,
        limits: Limits,
        clock: Callable[[], float] = time.time,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.limits = limits
        self.registry = Registry(clock=clock, max_sessions=limits.max_sessions)
        self._cache = cache
        self._log = log
        self._clock = clock

        self._inbox = Inbox()
        self._requests = Requests(self.registry, self._inbox, asyncio.get_running_loop())
        self.admission = Admission(
            self.registry, self._requests, max_queue=limits.max_queue, n_ctx=model.config.n_ctx
        )
        self._thread = ModelThread(
            model=model,
            cache=cache,
            inbox=self._inbox,
            writer=LogWriter(log, self._requests.deliver_from_thread),
            limits=limits,
            observer=observer or NoObserver(),
            on_end=self._requests.end_all_from_thread,
        )
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take up the sessions of the log and start the threads."""
        for session in self._log.load():
            self.registry.publish(session)
        self._thread.start()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def close(self) -> None:
        """Stop the threads; whatever still runs is ended. See `stuck`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._thread.stop()
        await asyncio.to_thread(self._thread.join, _STOP_SECONDS)
        await asyncio.sleep(0)  # lets the last deliveries run
        self._requests.end_all(Drained())
        if not self.stuck:
            self._log.close()

    @property
    def stuck(self) -> bool:
        """After `close`: whether the model thread is inside a step that does not return."""
        return self._thread.is_alive()

    # What there is to see. None of it waits.

    def view(self, session_id: str, owner: str = "") -> SessionView:
        """One session's state; touches it.

        Raises:
            SessionError: unknown, another owner's, or expired.
        """
        session = self.registry.find(session_id, owner)
        with self.registry.using(session_id):
            return self.view_of(session)

    def views(self, owner: str = "", *, limit: int, after: str | None = None) -> ViewPage:
        """Sessions of an owner, newest first, those after `after`.

        Raises:
            SessionError: `after` is not one of them.
        """
        page = self.registry.page(owner, limit=limit, after=after)
        return ViewPage(tuple(map(self.view_of, page.sessions)), page.has_more)

    def view_of(self, session: Session) -> SessionView:
        """A published session with what moves beside it."""
        resident = self._thread.places.n_rows(session.id) >= session.past_length
        return SessionView(
            session=session,
            expires=self.registry.expires(session),
            kv="resident" if resident else "evicted",
        )

    def using(self, session_id: str) -> AbstractContextManager[None]:
        """A read in flight: the session does not expire meanwhile."""
        return self.registry.using(session_id)

    def heartbeat_age(self) -> float:
        """Seconds since the model thread last showed life; infinite once it is dead."""
        if self._requests.over:
            return float("inf")
        return time.monotonic() - self._thread.heartbeat

    def stats(self) -> Stats:
        """The load."""
        running = self._thread.n_running
        return Stats(
            running=running,
            waiting=max(0, len(self._requests) - running),
            sessions=len(self.registry),
            evictions=self._thread.places.evicted,
            kv=self._cache.usage(),
        )

    # Mutations.

    async def open(self, command: Open) -> SessionView:
        """A new session, with its first tokens stepped; if they cannot be, there is no session.

        Raises:
            EngineError, SessionError, EmbeddingError: refused or failed.
        """
        self.admission.check_open()
        session = Session(
            id=self.registry.new_id(),
            created=self._clock(),
            ttl_seconds=command.ttl_seconds,
            owner=command.owner,
            metadata=command.metadata,
        )
        return await self._opened(session, _with_bos(command))

    async def fork(self, command: Fork) -> SessionView:
        """A new session that begins as another and goes its own way, sharing what is cached.

        It sees the parent's last commit and waits for nothing that the parent is doing. If its own
        tokens cannot be stepped there is no session.

        Raises:
            EngineError, SessionError, EmbeddingError: refused or failed.
        """
        begin = self.admission.branch(
            command.session_id, command.owner, at=command.at, past_length=command.past_length
        )
        session = replace(
            begin,
            id=self.registry.new_id(),
            created=self._clock(),
            ttl_seconds=command.ttl_seconds or begin.ttl_seconds,
            metadata=command.metadata,
            parent=Parent(begin.id, past_length=begin.past_length),
        )
        with self.using(begin.id):
            return await self._opened(session, command.token_ids)

    async def _opened(self, session: Session, token_ids: tuple[int, ...]) -> SessionView:
        self.admission.check_new(session.past_length, len(token_ids))
        reply = self._requests.opening()
        if token_ids:
            job = self._job(session, token_ids, len(token_ids), Capture(), reply, opening=True)
            self._inbox.put(RunJob(job))
        else:
            self._inbox.put(OpenIdle(session, reply))
        async with reply:
            done = await reply.result()
        return self.view_of(done.session)

    def append(self, command: Append) -> Reply:
        """Step the client's tokens.

        Raises:
            Refused, SessionError, PositionOverflow: at once, before any compute.
        """
        token_ids = _with_bos(command)
        assert token_ids, "nothing to step"
        session = self.admission.append(command, len(token_ids))
        reply = self._requests.changing(session)
        job = self._job(
            session, token_ids, len(token_ids), command.capture, reply, atomic=command.atomic
        )
        self._inbox.put(RunJob(job))
        return reply

    def generate(self, command: Generate) -> Reply:
        """Step tokens that are sampled here.

        Raises:
            Refused, SessionError, PositionOverflow: at once, before any compute.
        """
        session, n_new = self.admission.generate(command)
        generation = Generation(command, max_tokens=n_new, tokenizer=self.tokenizer)
        reply = self._requests.changing(session)
        job = self._job(
            session, (), n_new, command.capture, reply, atomic=command.atomic, sampled=generation
        )
        self._inbox.put(RunJob(job))
        return reply

    async def truncate(self, command: Truncate) -> SessionView:
        """Roll a session back.

        Raises:
            Refused, SessionError: unknown, busy, another length, or `to` beyond it.
        """
        session = self.admission.free(
            command.session_id, command.owner, past_length=command.past_length
        )
        session.truncated(command.to)
        self.admission.check_queue()
        reply = self._requests.changing(session)
        self._inbox.put(TruncateTo(session, command.to, reply))
        return self.view_of((await reply.result()).session)

    async def delete(self, session_id: str, owner: str = "") -> None:
        """Close a session; a request that runs on it ends with `SessionDeleted`.

        Raises:
            SessionError: unknown, another owner's, or expired.
            EngineError: the engine is down, or the log could not keep it.
        """
        self.admission.check_alive()
        session = self.registry.find(session_id, owner)
        self.registry.remove(session_id)
        reply = self._requests.deleting()
        self._inbox.put(ForgetSession(session, reply))
        await reply.result()

    async def drain(self, grace_seconds: float) -> None:
        """Take no new work and wait for what runs; after the grace period, end it."""
        self.admission.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._requests.none_left.wait(), grace_seconds)
        self._inbox.put(EndAll())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._requests.none_left.wait(), _LAST_WORDS_SECONDS)
        self._requests.end_all(Drained())  # the model thread does not answer

    def sweep(self) -> None:
        """Close the sessions that have expired."""
        for session in self.registry.expire():
            self._inbox.put(ForgetSession(session))

    def _job(
        self,
        session: Session,
        token_ids: tuple[int, ...],
        n_new: int,
        capture: Capture,
        reply: Reply,
        *,
        atomic: bool = True,
        opening: bool = False,
        sampled: Generation | None = None,
    ) -> Job:
        return Job(
            kind="generate" if sampled else "append",
            session=session,
            new_ids=token_ids,
            n_new=n_new,
            capture=capture,
            point_bytes=sum(point.n_bytes(self.model.config) for point in capture.points),
            atomic=atomic,
            opening=opening,
            reply=reply,
            tokenizer=self.tokenizer,
            generation=sampled,
        )

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                self.sweep()
            except Exception:
                logger.exception("sweep failed")
            await asyncio.sleep(_SWEEP_SECONDS)


def _with_bos(command: Open | Append) -> tuple[int, ...]:
    return ((END_OF_TEXT,) if command.prepend_bos else ()) + command.token_ids

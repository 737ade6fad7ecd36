"""The engine as the server sees it: admission, sessions in view, replies. The event loop.

Every check that needs no compute is made here, at once, against what was last published: a session
that is free has exactly that length, because one mutation runs at a time and each ends with its
commit being published. Only room in the K/V budget is the model thread's to grant.

    server -> Engine (event loop) -> Inbox -> ModelThread -> LogWriter (log thread)
                 ^                                               |
                 +---------- deliveries, once per iteration -----+
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import structlog

from cache.kv import KVCache
from embedding.positions import positions_for
from embedding.tokenizer import END_OF_TEXT, Tokenizer
from engine.commands import Append, Capture, Fork, Generate, Open, Truncate
from engine.errors import (
    BosNotAtStart,
    Drained,
    EmptySession,
    EngineDown,
    PastLengthMismatch,
    PositionsOutOfRange,
    QueueFull,
    SessionBusy,
    ShuttingDown,
)
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
        self.draining = False
        self._cache = cache
        self._log = log
        self._clock = clock

        self._inbox = Inbox()
        self._requests = Requests(self.registry, self._inbox, asyncio.get_running_loop())
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
        self._check_open()
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
        self._check_open()
        parent = self.registry.find(command.session_id, command.owner)
        _check_length(parent, command.past_length)
        at = parent.past_length if command.at is None else command.at
        session = Session(
            id=self.registry.new_id(),
            created=self._clock(),
            ttl_seconds=command.ttl_seconds or parent.ttl_seconds,
            owner=parent.owner,
            metadata=command.metadata,
            parent=Parent(parent.id, past_length=at),
            token_ids=parent.truncated(at).token_ids,
        )
        with self.using(parent.id):
            return await self._opened(session, command.token_ids)

    async def _opened(self, session: Session, token_ids: tuple[int, ...]) -> SessionView:
        positions_for(session.past_length, len(token_ids), self.model.config.n_ctx)
        self._check_queue()
        reply = self._requests.opening()
        fork_of = session.parent.id if session.parent else None
        if token_ids:
            job = self._job(
                session, token_ids, len(token_ids), Capture(), reply, opening=True, fork_of=fork_of
            )
            self._inbox.put(RunJob(job))
        else:
            self._inbox.put(OpenIdle(session, fork_of, reply))
        async with reply:
            done = await reply.result()
        return self.view_of(done.session)

    def append(self, command: Append) -> Reply:
        """Step the client's tokens.

        Raises:
            Refused, SessionError, PositionOverflow: at once, before any compute.
        """
        session = self._admit(command)
        if command.prepend_bos and session.past_length:
            raise BosNotAtStart(session.past_length)
        token_ids = _with_bos(command)
        assert token_ids, "nothing to step"
        self._check_room(session, len(token_ids), command)
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
        session = self._admit(command)
        if not session.past_length:
            raise EmptySession
        remaining = self.model.config.n_ctx - session.past_length
        n_new = max(1, remaining) if command.max_tokens is None else command.max_tokens
        self._check_room(session, n_new, command)
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
        session = self._admit(command)
        session.truncated(command.to)
        self._check_queue()
        reply = self._requests.changing(session)
        self._inbox.put(TruncateTo(session, command.to, reply))
        return self.view_of((await reply.result()).session)

    async def delete(self, session_id: str, owner: str = "") -> None:
        """Close a session; a request that runs on it ends with `SessionDeleted`.

        Raises:
            SessionError: unknown, another owner's, or expired.
            EngineError: the engine is down, or the log could not keep it.
        """
        self._check_alive()
        session = self.registry.find(session_id, owner)
        self.registry.remove(session_id)
        reply = self._requests.deleting()
        self._inbox.put(ForgetSession(session, reply))
        await reply.result()

    async def drain(self, grace_seconds: float) -> None:
        """Take no new work and wait for what runs; after the grace period, end it."""
        self.draining = True
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

    # Admission, in the order in which the API promises its checks.

    def _check_alive(self) -> None:
        if self._requests.over:
            raise EngineDown

    def _check_open(self) -> None:
        self._check_alive()
        if self.draining:
            raise ShuttingDown

    def _check_queue(self) -> None:
        if len(self._requests) >= self.limits.max_queue:
            raise QueueFull(self.limits.max_queue)

    def check_free(
        self, session_id: str, owner: str = "", *, past_length: int | None = None
    ) -> Session:
        """The session, if a mutation of it could begin now, at the length that is expected.

        Raises:
            EngineDown, ShuttingDown, SessionError, SessionBusy, PastLengthMismatch: why not.
        """
        self._check_open()
        session = self.registry.find(session_id, owner)
        if self.registry.is_busy(session_id):
            raise SessionBusy(session_id)
        _check_length(session, past_length)
        return session

    def _admit(self, command: Append | Generate | Truncate) -> Session:
        return self.check_free(command.session_id, command.owner, past_length=command.past_length)

    def _check_room(self, session: Session, n_new: int, command: Append | Generate) -> None:
        positions = positions_for(session.past_length, n_new, self.model.config.n_ctx)
        asked = command.capture.positions
        for position in sorted(asked or ()):
            if position not in positions:
                raise PositionsOutOfRange(
                    position=position, past_length=session.past_length, n_new=n_new
                )
        self._check_queue()
        if command.reply_limit is not None:
            n_full = n_new if asked is None else len(asked)
            command.reply_limit.take(n_records=n_new, n_full=n_full)

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
        fork_of: str | None = None,
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
            fork_of=fork_of,
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


def _check_length(session: Session, expected: int | None) -> None:
    if expected is not None and expected != session.past_length:
        raise PastLengthMismatch(expected=expected, past_length=session.past_length)


def _with_bos(command: Open | Append) -> tuple[int, ...]:
    return ((END_OF_TEXT,) if command.prepend_bos else ()) + command.token_ids

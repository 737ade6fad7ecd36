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

import structlog

from cache.kv import KVCache
from embedding.tokenizer import Tokenizer
from engine.admission import Admission
from engine.branches import forked, opened
from engine.commands import Append, Capture, Fork, Generate, Open, Probe, Read, Truncate
from engine.edits import Edits
from engine.errors import Drained
from engine.events import StepRecord
from engine.generation import Generation
from engine.inbox import EndAll, ForgetSession, Inbox, OpenIdle, RunJob, TruncateTo
from engine.jobs import Jobs
from engine.limits import Limits
from engine.model_thread import ModelThread
from engine.protocol import Model, NoObserver, Observer
from engine.recordings import Recordings, recorded
from engine.reply import Reply
from engine.requests import Requests
from engine.studies.turns import Turns
from engine.views import SessionView, Stats, ViewPage
from engine.writer import LogWriter
from sessions.log import SessionLog
from sessions.registry import Registry
from sessions.session import Session

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
        self.recordings = Recordings(limits.record_bytes)
        self._cache = cache
        self._log = log
        self._clock = clock

        self.turns = Turns()
        self._inbox = Inbox()
        self._jobs = Jobs(model.config, tokenizer, self.recordings)
        self._requests = Requests(
            self.registry, self.recordings, self._inbox, asyncio.get_running_loop()
        )
        self.admission = Admission(
            self.registry, self._requests, self.turns, limits, n_ctx=model.config.n_ctx
        )
        self._thread = ModelThread(
            model=model,
            cache=cache,
            inbox=self._inbox,
            writer=LogWriter(log, self._requests.deliver_from_thread),
            limits=limits,
            recordings=self.recordings,
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
        session = opened(command, self.registry.new_id(), self._clock())
        token_ids = command.all_ids
        self.admission.check_new(0, len(token_ids))
        reply = self._requests.opening(session.id)
        self._open(session, token_ids, reply, Capture(), Edits({}, base=0))
        async with reply:
            done = await reply.result()
        return self.view_of(done.session)

    def fork(self, command: Fork) -> Reply:
        """A new session that begins as another and goes its own way, sharing what is cached.

        It sees the parent's last commit and waits for nothing that the parent is doing. If its own
        steps cannot be made there is no session. The answer has a record of each of them.

        Raises:
            Refused, SessionError, EmbeddingError: at once, before any compute.
        """
        branch = self.admission.fork(command)
        begin = branch.begin
        session = forked(begin, command, self.registry.new_id(), self._clock())
        positions = branch.positions(command.token_ids)
        edit_bytes = self.admission.edit_bytes(len(positions), command.interventions)
        reply = self._requests.opening(session.id, edit_bytes)
        self.recordings.branch(session.id, begin.id, begin.past_length)
        edits = branch.edits(command.interventions, keep=command.keep_edits)
        self._open(session, branch.tail + command.token_ids, reply, command.capture, edits)
        return reply

    def _open(
        self,
        session: Session,
        token_ids: tuple[int, ...],
        reply: Reply,
        capture: Capture,
        edits: Edits,
    ) -> None:
        if token_ids:
            job = self._jobs.opening(session, token_ids, reply, capture=capture, edits=edits)
            self._inbox.put(RunJob(job))
        else:
            self._inbox.put(OpenIdle(session, reply))

    def append(self, command: Append) -> Reply:
        """Step the client's tokens.

        Raises:
            Refused, SessionError, PositionOverflow: at once, before any compute.
        """
        token_ids = command.all_ids
        assert token_ids, "nothing to step"
        session = self.admission.append(command, len(token_ids))
        edit_bytes = self.admission.edit_bytes(len(token_ids), command.interventions)
        reply = self._requests.changing(session, edit_bytes)
        self._inbox.put(RunJob(self._jobs.append(session, token_ids, command, reply)))
        return reply

    def generate(self, command: Generate) -> Reply:
        """Step tokens that are sampled here.

        Raises:
            Refused, SessionError, PositionOverflow: at once, before any compute.
        """
        session, n_new = self.admission.generate(command)
        generation = Generation(command, max_tokens=n_new, tokenizer=self.tokenizer)
        edit_bytes = self.admission.edit_bytes(n_new, command.interventions)
        reply = self._requests.changing(session, edit_bytes)
        self._inbox.put(RunJob(self._jobs.generate(session, generation, command, reply)))
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
        self.recordings.forget(session_id)
        reply = self._requests.deleting()
        self._inbox.put(ForgetSession(session, reply))
        await reply.result()

    # What changes nothing.

    def read(self, command: Read) -> Reply:
        """Look at committed steps, as the last commit left them. At least one must be asked for.

        Raises:
            Refused, SessionError: at once, before any compute.
        """
        session = self.admission.read(command)
        reply = self._requests.passing()
        job = self._jobs.read(session, self.registry.new_id(), command, reply)
        self._inbox.put(RunJob(job))
        return reply

    def probe(self, command: Probe) -> Reply:
        """Make steps that nobody keeps.

        Raises:
            Refused, SessionError, PositionOverflow: at once, before any compute.
        """
        branch = self.admission.probe(command)
        assert branch.tail or command.token_ids, "nothing to step"
        reply = self._requests.passing(queued=not command.of_study)
        job = self._jobs.probe(branch, self.registry.new_id(), command, reply)
        self._inbox.put(RunJob(job))
        return reply

    def recorded(self, command: Read) -> tuple[StepRecord, ...] | None:
        """What `read` would tell, if all of it was recorded as it was stepped.

        Raises:
            Refused, SessionError: at once.
        """
        if command.capture.top_logprobs is not None:
            return None
        session = self.admission.read(command)
        return recorded(session, command.capture, self.recordings, self.tokenizer)

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
            self.recordings.forget(session.id)
            self._inbox.put(ForgetSession(session))

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                self.sweep()
            except Exception:
                logger.exception("sweep failed")
            await asyncio.sleep(_SWEEP_SECONDS)

"""The one thread that owns the model, the K/V cache and the transitions of sessions.

One pass of its loop: step what is granted, settle the log's last batch, read the inbox, commit what
was stepped, hand the batch to the log. Whatever happens, every request that came in gets exactly
one terminal event: from here while the loop runs, and from the facade for those that are left when
it ends (`on_end`).
"""

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from cache.kv import KVCache
from engine.errors import (
    Cancelled,
    Drained,
    EngineDown,
    EngineError,
    NoRoom,
    SessionDeleted,
    StepFailed,
)
from engine.events import Done, Event, Failed, Progress, Started, Usage
from engine.inbox import (
    CancelRequest,
    EndAll,
    ForgetSession,
    Inbox,
    Message,
    OpenIdle,
    RunJob,
    TruncateTo,
)
from engine.job import Job
from engine.limits import Limits
from engine.places import Places
from engine.protocol import Finished, Model, Observer
from engine.recordings import Recordings
from engine.reply import Reply
from engine.roster import Roster
from engine.stepper import Grants, Outcome, Stepper
from engine.writer import Batch, Delivery, LogWriter
from sessions.log import Committed, Deleted, Entry, Opened, Truncated
from sessions.session import Session

logger = structlog.get_logger()

_HEARTBEAT_SECONDS = 0.25  # the longest sleep of an idle thread


class ModelThread(threading.Thread):
    """Steps jobs until it is stopped."""

    def __init__(
        self,
        *,
        model: Model,
        cache: KVCache,
        inbox: Inbox,
        writer: LogWriter,
        limits: Limits,
        recordings: Recordings,
        observer: Observer,
        on_end: Callable[[EngineError], None],
    ) -> None:
        super().__init__(name="model", daemon=True)
        self._inbox = inbox
        self.heartbeat = time.monotonic()
        self._stepper = Stepper(model)
        self._writer = writer
        self._recordings = recordings
        self._observer = observer
        self._on_end = on_end
        self.places = Places(cache, lambda: self._roster.sessions_at_work)
        self._roster = Roster(self.places, limits)
        self.n_running = 0  # jobs stepped in the latest iteration
        self._undeleted: list[Entry] = []  # deletions that the log must still keep
        self._stopping = False

    def stop(self) -> None:
        """Leave the loop after this pass. Any thread."""
        self._stopping = True
        self._inbox.ring()

    def run(self) -> None:
        """The loop."""
        error: EngineError = Drained()
        try:
            while not self._stopping:
                self._pass()
        except BaseException as fault:
            logger.critical("model thread died", exc_info=fault)
            error = EngineDown()
        finally:
            self._writer.close()
            self._on_end(error)

    def _pass(self) -> None:
        self.heartbeat = time.monotonic()
        grants = self._roster.grants()
        self.n_running = len(grants)
        outcomes = self._step(grants)
        self._settle()
        batch = Batch()
        messages = self._inbox.take()
        for message in messages:
            self._handle(message, batch)
        for outcome in outcomes:
            if outcome.job in self._roster:
                self._commit(outcome, batch)
        if not batch.deliveries and not batch.entries:
            batch.entries, self._undeleted = self._undeleted, []
        self._writer.submit(batch)
        if not grants and not messages:
            self._inbox.wait(_HEARTBEAT_SECONDS)

    # Stepping.

    def _step(self, grants: Grants) -> Sequence[Outcome]:
        if not grants:
            return ()
        began = time.monotonic()
        computed = [n for job, n in grants if not job.finds]
        outcomes = self._stepper.run(grants)
        self._observer.iteration(
            n_rows=len(computed), n_tokens=sum(computed), seconds=time.monotonic() - began
        )
        return outcomes

    def _settle(self) -> None:
        """Take back what the log could not keep; the clients are told by the writer."""
        lost = self._writer.settle()
        self._undeleted += [entry for entry in lost.entries if isinstance(entry, Deleted)]
        told: set[Reply] = set()
        for delivery in lost.deliveries:
            if (
                delivery.logged and delivery.reply not in told
            ):  # its first event tells what the log had before
                told.add(delivery.reply)
                self._take_back(delivery)

    def _take_back(self, lost: Delivery) -> None:
        for job in self._roster.of_reply(lost.reply):
            self._roster.remove(job)
            self._restore(job.session.id, lost.before)
            self._observe(job, StepFailed.__name__)
        if isinstance(lost.event, Progress | Done):  # its job may have left already
            self._restore(lost.event.session.id, lost.before)
            self._recordings.give_back(lost.event.recorded)

    # Messages.

    def _handle(self, message: Message, batch: Batch) -> None:
        match message:
            case RunJob(job):
                self._start(job, batch)
            case OpenIdle(session, reply):
                self.places.branch(session)
                batch.entries.append(Opened(session))
                self._tell(batch, reply, Done(session, Usage()), before=None)
            case TruncateTo(session, to, reply):
                self._truncate(session, to, reply, batch)
            case ForgetSession(session, reply):
                self._forget(session, reply, batch)
            case CancelRequest(reply):
                for job in self._roster.of_reply(reply):
                    self._fail(job, Cancelled(), batch)
            case EndAll():
                for job in self._roster:
                    self._fail(job, Drained(), batch)

    def _start(self, job: Job, batch: Batch) -> None:
        known = _known(job)
        try:
            self._roster.start(job)
        except NoRoom as error:
            self._restore(job.session.id, known)
            self._tell_job(batch, job, Failed(error, known), before=known)
            if job.kind != "probe":  # it is tried again, or its study fails
                self._observe(job, type(error).__name__)
            return
        self._tell_job(batch, job, Started(), before=known)

    def _truncate(self, session: Session, to: int, reply: Reply, batch: Batch) -> None:
        truncated = session.truncated(to)
        self.places.trim(session.id, to)
        batch.entries.append(Truncated(session.id, to))
        self._tell(batch, reply, Done(truncated, Usage()), before=session)

    def _forget(self, session: Session, reply: Reply | None, batch: Batch) -> None:
        for job in self._roster.of_session(session.id):
            self._fail(job, SessionDeleted(session.id), batch)
        self.places.forget(session.id)
        batch.entries.append(Deleted(session.id))
        if reply is not None:
            self._tell(batch, reply, Done(session, Usage()), before=session)

    # Commits and endings.

    def _commit(self, outcome: Outcome, batch: Batch) -> None:
        job, records = outcome.job, outcome.records
        if outcome.error is not None:
            self._fail(job, outcome.error, batch)
            return
        if job.atomic:
            job.records.extend(records)
        elif records:
            before = _known(job)
            if not job.passing:
                committed = job.committed()
                batch.entries.append(_new_steps(job, committed))
                job.session = committed
                self.places.index(job.session)
            progress = Progress(_told(job), tuple(records), job.sight.hand_over())
            n_bytes = sum(record.n_bytes for record in records)
            self._tell_job(batch, job, progress, before=before, n_bytes=n_bytes)
        if job.done:
            self._finish(job, batch)

    def _finish(self, job: Job, batch: Batch) -> None:
        before, committed = _known(job), job.committed()
        if not job.passing:
            if job.opening:
                batch.entries.append(Opened(committed))
            elif committed.past_length > job.session.past_length:
                batch.entries.append(_new_steps(job, committed))
        job.session = committed
        done = Done(_told(job), job.usage(), tuple(job.records), job.sight.hand_over())
        self._tell_job(batch, job, done, before=before)
        self._roster.remove(job)
        if job.kind != "probe" or not job.edits.are_new:
            self.places.index(committed)
        self._restore(committed.id, None if job.passing else committed)
        self._observe(job, job.finish_reason)

    def _fail(self, job: Job, error: EngineError, batch: Batch) -> None:
        known = _known(job)
        self._roster.remove(job)
        self._restore(job.session.id, known)
        self._recordings.give_back(job.sight.hand_over())
        self._tell_job(batch, job, Failed(error, known), before=known)
        self._observe(job, type(error).__name__)

    def _restore(self, session_id: str, known: Session | None) -> None:
        """Keep no more of the cache than the session that its owner knows of has."""
        if known is None:
            self.places.forget(session_id)
        else:
            self.places.trim(session_id, known.past_length)

    def _tell_job(
        self, batch: Batch, job: Job, event: Event, *, before: Session | None, n_bytes: int = 0
    ) -> None:
        job.reply.produced_bytes += n_bytes
        logged = not job.passing
        batch.deliveries.append(Delivery(job.reply, event, before, n_bytes, logged=logged))

    def _tell(self, batch: Batch, reply: Reply, event: Event, *, before: Session | None) -> None:
        batch.deliveries.append(Delivery(reply, event, before))

    def _observe(self, job: Job, reason: str | None) -> None:
        now = time.monotonic()
        self._observer.finished(
            Finished(
                kind=job.kind,
                reason=reason or "done",
                n_prompt=len(job.new_ids) if job.started else 0,
                n_generated=job.n_generated,
                n_cached=0 if job.reads else job.cached,
                n_rebuilt=job.rebuilt,
                queue_seconds=(job.started or now) - job.admitted,
                first_token_seconds=job.first_token and job.first_token - job.admitted,
                seconds=now - job.admitted,
            )
        )


def _known(job: Job) -> Session | None:
    """The session as its owner may know it: one that is being opened does not exist yet."""
    return None if job.unknown else job.session


def _told(job: Job) -> Session:
    """The session that a client is told of: a job that reads has a branch of it to itself."""
    return job.subject or job.session


def _new_steps(job: Job, committed: Session) -> Committed:
    """What `committed` has and the job's session does not yet, for the log."""
    first = job.session.past_length
    edits = job.edits.between(range(first, committed.past_length))
    return Committed(committed.id, first, committed.token_ids[first:], edits)

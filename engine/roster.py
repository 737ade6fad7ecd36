"""Who is at work: which jobs step next, and which wait for room. Numpy, no torch; the model thread.

A job starts with room for the tokens that are known and grows as it generates. When the cache has
no more, and nobody idle could give some, the youngest job at work gives its place back and waits;
then it catches up like everybody else. The oldest is never the one that waits, so there is always
one that ends.

    start ──> at work ──────────────> removed
                 │  ^
       preempted v  │ resumed, oldest first
               waiting
"""

from collections.abc import Iterator
from operator import attrgetter

from engine.errors import NoRoom
from engine.job import Job
from engine.limits import FOUND_TOKENS, Limits
from engine.places import Places
from engine.reply import Reply
from engine.scheduler import share
from engine.stepper import Grants


class Roster:
    """The jobs of one model thread and their places."""

    def __init__(self, places: Places, limits: Limits) -> None:
        self._places = places
        self._limits = limits
        self._jobs: list[Job] = []  # those served longest ago first

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs))

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    @property
    def sessions_at_work(self) -> set[str]:
        """Ids of the sessions whose places are in use."""
        return {job.session.id for job in self._jobs if job.placed}

    def of_session(self, session_id: str) -> list[Job]:
        """The jobs of a session, or about it: one that changes it at most, and some that read."""
        return [
            job
            for job in self._jobs
            if session_id in (job.session.id, job.subject and job.subject.id)
        ]

    def of_reply(self, reply: Reply) -> list[Job]:
        """The jobs that a request waits for: one, or none."""
        return [job for job in self._jobs if job.reply is reply]

    def start(self, job: Job) -> None:
        """Take a job in.

        Raises:
            NoRoom: it could never be done, or not now without taking room from a job.
        """
        self._places.check_possible(job.base + job.n_new)
        if self._waiting():  # they come first
            raise self._places.no_room(len(job.tokens))
        if job.unknown:
            self._places.branch(job.session)
        self._place(job)
        self._jobs.append(job)

    def remove(self, job: Job) -> None:
        """Forget a job; its place is the caller's to keep or to give back."""
        self._jobs.remove(job)

    def grants(self) -> Grants:
        """Who steps how many tokens in the next iteration; all of them have room for it."""
        self._resume()
        grants = self._shared()
        served = {job for job, _ in grants}
        self._jobs.sort(key=lambda job: job in served)  # stable: the unserved move to the front
        for job, n in sorted(grants, key=lambda grant: grant[0].admitted):
            self._ensure_room(job, n)
        return [(job, n) for job, n in grants if job.placed]

    def _shared(self) -> Grants:
        limits = self._limits
        granted = share(
            [job.demand(limits.reply_buffer_bytes) for job in self._jobs],
            max_rows=limits.max_rows,
            prefill_chunk=limits.prefill_chunk,
            found_chunk=FOUND_TOKENS,
        )
        return [(job, n) for job, n in zip(self._jobs, granted, strict=True) if n]

    def _ensure_room(self, job: Job, n: int) -> None:
        while job.placed and job.kv.length + job.n_written(n) > job.kv.reserved:
            try:
                self._places.grow(job.session.id, job.kv.length + job.n_written(n))
            except NoRoom:
                self._preempt()

    def _preempt(self) -> None:
        youngest = max((job for job in self._jobs if job.placed), key=attrgetter("admitted"))
        youngest.suspend()
        self._places.evict(youngest.session.id, "preempted")

    def _resume(self) -> None:
        for job in self._waiting():
            try:
                self._place(job)
            except NoRoom:
                return

    def _waiting(self) -> list[Job]:
        """Jobs without a place, oldest first."""
        waiting = [job for job in self._jobs if not job.placed]
        return sorted(waiting, key=attrgetter("admitted"))

    def _place(self, job: Job) -> None:
        kv = self._places.take(
            job.session,
            step_keys=job.step_keys,
            reusable=job.reusable,
            length=len(job.tokens) + (job.generation is not None),
        )
        job.start(kv)

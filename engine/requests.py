"""The requests in flight: who gets which event, and what each holds until its last one.

The event loop, except for the two `_from_thread` functions, which other threads call.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog

from engine.errors import EngineError
from engine.events import Done, Failed, Progress
from engine.inbox import CancelRequest, Inbox
from engine.recordings import Recordings
from engine.reply import Reply
from engine.writer import Delivery
from sessions.registry import Registry
from sessions.session import Session

logger = structlog.get_logger()


@dataclass(slots=True)
class _Request:
    """`release` gives back what the request holds; `publishes`: its commits become visible.

    `session` is what was published last; None: there is none, not yet or no more.
    """

    release: Callable[[], None]
    session_id: str | None = None  # None: none comes of it
    edit_bytes: int = 0  # that it may add to histories
    session: Session | None = None
    publishes: bool = True
    queued: bool = True


class Requests:
    """Replies that have not had their terminal event."""

    def __init__(
        self,
        registry: Registry,
        recordings: Recordings,
        inbox: Inbox,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.over = False  # the model thread is gone: nobody would answer a request
        self.none_left = asyncio.Event()
        self.none_left.set()
        self._registry = registry
        self._recordings = recordings
        self._inbox = inbox
        self._loop = loop
        self._requests: dict[Reply, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def n_queued(self) -> int:
        """Those that count in the queue."""
        return sum(request.queued for request in self._requests.values())

    @property
    def edit_bytes(self) -> int:
        """What the requests in flight may add to histories in edits."""
        return sum(request.edit_bytes for request in self._requests.values())

    def changing(self, session: Session, edit_bytes: int = 0) -> Reply:
        """A mutation of a session, which is busy until it ends."""
        self._registry.mark_busy(session.id)
        release = partial(self._registry.clear_busy, session.id)
        return self._add(_Request(release, session.id, edit_bytes, session))

    def passing(self, *, queued: bool = True) -> Reply:
        """Work that leaves no session behind; `queued`: it counts as a request of its own."""
        return self._add(_Request(lambda: None, publishes=False, queued=queued))

    def opening(self, session_id: str, edit_bytes: int = 0) -> Reply:
        """A session being opened, whose place is held until it ends.

        Raises:
            TooManySessions: there is no place.
        """
        self._registry.hold_place()
        return self._add(_Request(self._registry.release_place, session_id, edit_bytes))

    def deleting(self) -> Reply:
        """A session being deleted: it is out of sight already and stays so."""
        return self._add(_Request(lambda: None, publishes=False))

    def deliver_from_thread(self, deliveries: Sequence[Delivery]) -> None:
        """Have one iteration's events handed out. Any thread."""
        self._from_thread(partial(self._deliver, deliveries))

    def end_all_from_thread(self, error: EngineError) -> None:
        """Have every request that is left end with `error`: the model thread is gone."""
        self._from_thread(partial(self._thread_ended, error))

    def end_all(self, error: EngineError) -> None:
        """End every request that is left: the model thread is gone, or does not answer."""
        for reply in list(self._requests):
            reply.put(Failed(error, self._end(reply).session), 0)

    def _from_thread(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(act)

    def _thread_ended(self, error: EngineError) -> None:
        self.over = True
        self.end_all(error)

    def _add(self, request: _Request) -> Reply:
        reply = Reply(on_cancel=self._cancel, wake=self._inbox.ring)
        self._requests[reply] = request
        self.none_left.clear()
        return reply

    def _cancel(self, reply: Reply) -> None:
        self._inbox.put(CancelRequest(reply))

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            try:
                self._deliver_one(delivery)
            except Exception:  # its neighbours' events must not be lost with it
                logger.exception("an event was not delivered")

    def _deliver_one(self, delivery: Delivery) -> None:
        """Publish what was committed, then tell of it; a session is free before its last event."""
        request, event = self._requests.get(delivery.reply), delivery.event
        if isinstance(event, Progress | Done) and event.recorded:
            self._recordings.arrive(event.recorded)
        if request is None:
            return
        if isinstance(event, Progress | Done) and request.publishes:
            self._publish(event)
            request.session = event.session
            event = replace(event, recorded=())  # a slow reader would hold it
        if isinstance(event, Done | Failed):
            self._end(delivery.reply)
        delivery.reply.put(event, delivery.n_bytes)

    def _publish(self, event: Progress | Done) -> None:
        session = event.session
        if self._registry.publish(session):
            self._recordings.keep(session.id, session.past_length, event.recorded)

    def _end(self, reply: Reply) -> _Request:
        request = self._requests.pop(reply)
        request.release()
        if request.session_id is not None and request.session is None:  # it never came to be
            self._recordings.forget(request.session_id)
        if not self._requests:
            self.none_left.set()
        return request

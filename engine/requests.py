"""The requests in flight: who gets which event, and what each holds until its last one.

The event loop, except for the two `_from_thread` functions, which other threads call.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import EngineError
from engine.events import Done, Failed, Progress
from engine.inbox import CancelRequest, Inbox
from engine.reply import Reply
from engine.writer import Delivery
from sessions.registry import Registry


@dataclass(frozen=True, slots=True)
class _Request:
    """`release` gives back what the request holds; `publishes`: its commits become visible."""

    release: Callable[[], None]
    publishes: bool = True


class Requests:
    """Replies that have not had their terminal event."""

    def __init__(self, registry: Registry, inbox: Inbox, loop: asyncio.AbstractEventLoop) -> None:
        self.none_left = asyncio.Event()
        self.none_left.set()
        self._registry = registry
        self._inbox = inbox
        self._loop = loop
        self._requests: dict[Reply, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def changing(self, session_id: str) -> Reply:
        """A mutation of a session, which is busy until it ends."""
        self._registry.mark_busy(session_id)
        return self._add(_Request(lambda: self._registry.clear_busy(session_id)))

    def opening(self) -> Reply:
        """A session being opened, whose place is held until it ends.

        Raises:
            TooManySessions: there is no place.
        """
        self._registry.hold_place()
        return self._add(_Request(self._registry.release_place))

    def deleting(self) -> Reply:
        """A session being deleted: it is out of sight already and stays so."""
        return self._add(_Request(lambda: None, publishes=False))

    def deliver_from_thread(self, deliveries: Sequence[Delivery]) -> None:
        """Have one iteration's events handed out. Any thread."""
        self._loop.call_soon_threadsafe(self._deliver, deliveries)

    def end_all_from_thread(self, error: EngineError) -> None:
        """Have every request that is left end with `error`: the model thread is gone."""
        self._loop.call_soon_threadsafe(self._end_all, error)

    def _add(self, request: _Request) -> Reply:
        reply = Reply(on_cancel=self._cancel, wake=self._inbox.ring)
        self._requests[reply] = request
        self.none_left.clear()
        return reply

    def _cancel(self, reply: Reply) -> None:
        self._inbox.put(CancelRequest(reply))

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Publish what was committed, then tell of it; a session is free before its last event."""
        for delivery in deliveries:
            request = self._requests.get(delivery.reply)
            if request is None:
                continue
            event = delivery.event
            if isinstance(event, Progress | Done) and request.publishes:
                self._registry.publish(event.session)
            if isinstance(event, Done | Failed):
                self._end(delivery.reply)
            delivery.reply.put(event, delivery.n_bytes)

    def _end(self, reply: Reply) -> None:
        self._requests.pop(reply).release()
        if not self._requests:
            self.none_left.set()

    def _end_all(self, error: EngineError) -> None:
        for reply in list(self._requests):
            self._end(reply)
            reply.put(Failed(error, None), 0)

"""What the event loop may see of the engine: values of one moment. Pure Python; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from cache.accounting import KVUsage
from sessions.session import Session


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as its owner may see it. `expires` is in seconds of the engine's clock."""

    session: Session
    expires: float
    kv: str  # "resident" or "evicted"


@dataclass(frozen=True, slots=True)
class ViewPage:
    """Some of an owner's sessions, newest first."""

    views: tuple[SessionView, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine's load at this moment."""

    running: int
    waiting: int
    sessions: int
    evictions: Mapping[str, int]  # by reason: "room", "preempted", "prefix"
    kv: KVUsage

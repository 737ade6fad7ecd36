"""Servers whose model waits at a gate, and requests that are under way meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Scope

from tests.server.hand import Hand, http_scope, until
from tests.server.serving import Gated, GatedLoader, Serving, serving

T = TypeVar("T")


@asynccontextmanager
async def gated(**settings: Any) -> AsyncIterator[tuple[Serving, Gated]]:
    loader = GatedLoader()
    async with serving(loader=loader, **settings) as server:
        try:
            yield server, loader.model
        finally:
            loader.model.fails = False
            loader.model.open()


async def meanwhile(model: Gated, task: asyncio.Task[T]) -> T:
    """What the task brings, while passes go on one by one."""
    async with asyncio.timeout(30):
        while not task.done():
            model.allow()
            await asyncio.wait([task], timeout=0.01)
    return task.result()


def steps_scope(session_id: str, verb: str, *, accept: str = "*/*") -> Scope:
    headers = {"content-type": "application/json", "accept": accept}
    return http_scope("POST", f"/v1/sessions/{session_id}/{verb}", headers=headers)


def begin(server: Serving, scope: Scope, **body: Any) -> tuple[Hand, asyncio.Task[None]]:
    hand = Hand()
    hand.feed(json.dumps(body).encode())
    return hand, asyncio.create_task(hand.run(server.app, scope))


async def until_busy(server: Serving, session_id: str) -> None:
    await until(lambda: server.service.engine.registry.is_busy(session_id))


async def until_idle(server: Serving) -> None:
    await until(lambda: not _n_requests(server))


def _n_requests(server: Serving) -> int:
    stats = server.service.engine.stats()
    return stats.running + stats.waiting

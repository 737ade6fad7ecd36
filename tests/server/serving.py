"""A whole server in this process: the real engine under `random:tiny`, or under a model double."""

import asyncio
import base64
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from torch import Tensor

from cache.accounting import KV
from embedding.tables import EmbeddingTables
from engine.protocol import Model
from model.batch import Captured, Floats, Row
from model.config import GPT2Config
from server.app import create_app
from server.errors import Loading
from server.facts import ModelFacts
from server.host import Host, Loader, Service
from server.loading import Loaded, LoadingProgress, load
from server.settings import Settings
from tests.server.hand import until


@dataclass(frozen=True, slots=True)
class Serving:
    """A running application, its host and a client of it."""

    app: FastAPI
    host: Host
    client: httpx.AsyncClient

    @property
    def service(self) -> Service:
        return self.host.service

    async def open(self, **body: Any) -> str:
        answer = await self.client.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def length(self, session_id: str) -> int:
        return int((await self.client.get(f"/v1/sessions/{session_id}")).json()["past_length"])


@asynccontextmanager
async def serving(
    *, loader: Loader = load, clock: Callable[[], float] = time.time, **settings: Any
) -> AsyncIterator[Serving]:
    """Serve `random:tiny` on one thread until the block ends."""
    defaults: dict[str, Any] = {"model": "random:tiny", "threads": 1, "kv_budget": 2**26}
    chosen = Settings(**(defaults | settings))
    host = Host(chosen, loader=loader, clock=clock)
    app = create_app(chosen, host)
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app):
        await until_loaded(host)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Serving(app, host, client)


async def until_loaded(host: Host) -> None:
    """Wait for the loading thread."""
    await until(lambda: host.failure is not None or _is_loaded(host))
    assert host.failure is None, host.failure


def _is_loaded(host: Host) -> bool:
    try:
        host.check_ready()
    except Loading:
        return False
    return True


class Gated:
    """A model that waits at a gate before each pass, and fails passes when told to."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tickets = threading.Semaphore(0)
        self.gated = False
        self.n_passes = 0
        self.fails = False

    @property
    def config(self) -> GPT2Config:
        return self._model.config

    @property
    def tables(self) -> EmbeddingTables:
        return self._model.tables

    @property
    def dtype(self) -> str:
        return self._model.dtype

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._model.parameters

    def close(self) -> None:
        """From now on each pass needs an `allow`."""
        self.gated = True

    def allow(self, n_passes: int = 1) -> None:
        self._tickets.release(n_passes)

    def open(self) -> None:
        self.gated = False
        self._tickets.release(10_000)

    def forward(self, rows: Sequence[Row]) -> list[Captured]:
        if self.gated:
            self._tickets.acquire()
        if self.fails:
            raise RuntimeError("the model double fails")
        self.n_passes += 1
        return self._model.forward(rows)

    def look_up(self, row: Row) -> Captured:
        return self._model.look_up(row)

    def logits(self, wanted: Sequence[tuple[KV, int]], hidden: Floats | None = None) -> Floats:
        return self._model.logits(wanted, hidden)


class GatedLoader:
    """Loads as the product does, then puts the gate before the model."""

    model: Gated

    def __call__(self, settings: Settings, progress: LoadingProgress) -> Loaded:
        loaded = load(settings, progress)
        self.model = Gated(loaded.model)
        return replace(loaded, model=self.model)


def served(test: Callable[[Serving], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test against a fresh server."""

    def run() -> None:
        async def main() -> None:
            async with serving() as server:
                await test(server)

        asyncio.run(main())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The envelope's content, which has at least the promised fields."""
    told = answer.json()["error"]
    assert set(told) >= {"message", "type", "param", "code"}
    return dict(told)


def vector(record: dict[str, Any], point: str) -> npt.NDArray[np.float32]:
    """A point of a record that came as base64."""
    return np.frombuffer(base64.b64decode(record["points"][point]["data"]), dtype="<f4")


def facts_about(config: GPT2Config) -> ModelFacts:
    """What would be told of a model of this shape."""
    return ModelFacts(
        name="m",
        source="random",
        fingerprint="f",
        dtype="float32",
        kv_dtype="float32",
        batch_invariant=False,
        created=0,
        config=config,
    )

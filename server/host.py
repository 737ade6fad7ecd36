"""The life of what is served: loading, ready, draining, closed. The event loop.

    Host.start ── loading thread ── ready ── drain ── close
                       └── failed: the server stops, with the reason

Loading has its own thread, so that `/health` answers and a shutdown need not wait for it.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import structlog

from engine.errors import ShuttingDown
from engine.facade import Engine
from engine.views import Stats
from server.budget import Budget
from server.errors import Loading, Stalled
from server.facts import ModelFacts
from server.interventions.vectors import Vectors
from server.loading import Loaded, LoadingProgress, limits_of, load
from server.metrics import Metrics
from server.settings import Settings
from server.wire import Wire
from sessions.log import MemoryLog

_log = structlog.get_logger("stepscope.host")

Loader = Callable[[Settings, LoadingProgress], Loaded]
_DEAD_AFTER_STALLS = 10
ANSWERS_AT_ONCE = 4
"""JSON answers of the largest size that may be made and sent; more of a smaller one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What route handlers work with, once the model is there.

    `answers` bounds what all JSON answers hold together, until they are sent; `vectors` are the
    clients' own.
    """

    engine: Engine
    facts: ModelFacts
    wire: Wire
    settings: Settings
    answers: Budget
    vectors: Vectors

    def holding(self, n_bytes: int) -> AbstractContextManager[object]:
        """The life of an answer of `n_bytes`, by an estimate from above."""
        return self.answers.lease(min(n_bytes, self.settings.max_response_bytes))


class Host:
    """Owns the service of one process."""

    def __init__(
        self,
        settings: Settings,
        *,
        loader: Loader = load,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` tells unix seconds; times to live are measured by it."""
        self.settings = settings
        self.metrics = Metrics(self._stats)
        self.failure: BaseException | None = None
        self._loader = loader
        self._clock = clock
        self._progress = LoadingProgress()
        self._loading: threading.Thread | None = None
        self._service: Service | None = None
        self._closed: Engine | None = None
        self._draining = False

    @property
    def service(self) -> Service:
        """What is served.

        Raises:
            Loading: not yet.
            ShuttingDown: no more.
        """
        if self._service is not None:
            return self._service
        if self._draining:
            raise ShuttingDown
        raise Loading(f"the model is loading: {self._progress}")

    @property
    def loading(self) -> bool:
        """Whether the loading thread is at work."""
        return self._loading is not None and self._loading.is_alive()

    @property
    def stuck(self) -> bool:
        """After `close`: whether the model thread is in a step that does not return."""
        return self._closed is not None and self._closed.stuck

    def start(self) -> None:
        """Begin to load. Inside the running loop."""
        loop = asyncio.get_running_loop()
        self._loading = threading.Thread(
            target=self._load, args=(loop,), name="stepscope-loading", daemon=True
        )
        self._loading.start()

    def check_ready(self) -> None:
        """See that a step would be taken now.

        Raises:
            Loading, ShuttingDown, Stalled: why not.
        """
        engine = self.service.engine
        if self._draining or engine.admission.draining:
            raise ShuttingDown
        self._check_heartbeat(engine, self.settings.stall_seconds)

    def check_alive(self) -> None:
        """See that waiting may still help.

        Raises:
            Stalled: the model thread is silent for so long that a restart is better.
        """
        if self._service is not None:
            limit = _DEAD_AFTER_STALLS * self.settings.stall_seconds
            self._check_heartbeat(self._service.engine, limit)

    async def drain(self) -> None:
        """Take no new work; let what runs finish within the grace period, or end it."""
        self._draining = True
        if self._service is not None:
            await self._service.engine.drain(self.settings.grace_seconds)

    async def close(self) -> None:
        """Stop the engine."""
        self._draining = True
        if self._service is not None:
            self._closed, self._service = self._service.engine, None
            await self._closed.close()

    def _stats(self) -> Stats | None:
        return None if self._service is None else self._service.engine.stats()

    def _check_heartbeat(self, engine: Engine, limit: float) -> None:
        age = engine.heartbeat_age()
        if age > limit:
            raise Stalled(f"the model thread has shown no life for {age:.0f} seconds")

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loading thread."""
        try:
            loaded = self._loader(self.settings, self._progress)
        except Exception as error:
            loop.call_soon_threadsafe(self._failed, error)
        else:
            loop.call_soon_threadsafe(self._begin, loaded)

    def _begin(self, loaded: Loaded) -> None:
        if self._draining:
            return
        try:
            self._service = self._serve(loaded)
        except Exception as error:
            self._failed(error)
            return
        _tell(loaded.facts, self.settings, loaded.cache.usage().bytes_total)

    def _serve(self, loaded: Loaded) -> Service:
        engine = Engine(
            model=loaded.model,
            cache=loaded.cache,
            tokenizer=loaded.tokenizer,
            log=MemoryLog(),
            limits=limits_of(self.settings),
            clock=self._clock,
            observer=self.metrics,
        )
        engine.start()
        return Service(
            engine=engine,
            facts=loaded.facts,
            wire=Wire(loaded.tokenizer, loaded.facts),
            settings=self.settings,
            answers=Budget(ANSWERS_AT_ONCE * self.settings.max_response_bytes),
            vectors=Vectors(self.settings.vector_budget),
        )

    def _failed(self, error: Exception) -> None:
        self.failure = error
        _log.error("loading_failed", error=type(error).__name__, reason=str(error))


def _tell(facts: ModelFacts, settings: Settings, kv_bytes: int) -> None:
    """Say which weights run."""
    _log.info(
        "ready",
        model=facts.name,
        n_params=facts.config.n_params,
        fingerprint=facts.fingerprint,
        dtype=facts.dtype,
        kv_dtype=facts.kv_dtype,
        batch_invariant=facts.batch_invariant,
        threads=settings.threads,
        kv_bytes=kv_bytes,
        session_log="memory",  # nothing of a session outlives the process
        source=facts.source,
    )

"""An engine for tests: small lively weights, a model double, and its books proved at the end."""

import asyncio
import functools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

import pytest

from cache.accounting import PIECE
from cache.kv import KVCache
from embedding.tokenizer import Tokenizer
from engine.commands import Append, Capture, Fork, Generate, Open, Probe, Read
from engine.events import Done, Failed, Progress, StepRecord
from engine.facade import Engine
from engine.limits import Limits
from engine.protocol import Model, Observer
from engine.reply import Reply
from model.attention.explicit import PIECE as EXACT_PIECE
from model.config import GPT2Config
from model.gpt2 import GPT2, cache_shape
from model.points import Point, parse_points
from model.sampling import Sampling
from model.weights.checkpoint import Checkpoint
from sessions.log import MemoryLog, SessionLog
from sessions.session import Session
from tests.engine.doubles import Gated, Watched
from tests.lively import lively_checkpoint

P = ParamSpec("P")
E = TypeVar("E", bound=Exception)

CONFIG = GPT2Config(n_ctx=128, n_embd=32, n_layer=2, n_head=2)
LIVELY = lively_checkpoint(CONFIG)
LONG = lively_checkpoint(GPT2Config(n_ctx=1024, n_embd=16, n_layer=1, n_head=2))
TOKENIZER = Tokenizer()
GREEDY = Sampling(temperature=0)
LONGEST_TEST_SECONDS = 120  # a test that hangs fails instead


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in a loop of its own; one that waits for ever fails."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LONGEST_TEST_SECONDS))

    return run


class Rig:
    """A running engine and the shorthands that tests use on it."""

    def __init__(self, engine: Engine, model: Watched, cache: KVCache) -> None:
        self.engine = engine
        self.model = model
        self.cache = cache

    # Requests, each to its end.

    async def open(self, token_ids: Sequence[int] = (), *, ttl: int = 600, owner: str = "") -> str:
        command = Open(token_ids=tuple(token_ids), ttl_seconds=ttl, owner=owner)
        return (await self.engine.open(command)).session.id

    async def fork(
        self, session_id: str, at: int | None = None, token_ids: Sequence[int] = (), **more: Any
    ) -> str:
        return (await self.forked(session_id, at, token_ids, **more)).session.id

    async def forked(
        self, session_id: str, at: int | None = None, token_ids: Sequence[int] = (), **more: Any
    ) -> Done:
        command = Fork(session_id=session_id, at=at, token_ids=tuple(token_ids), **more)
        return await ended(self.engine.fork(command))

    async def read(
        self,
        session_id: str,
        *points: str,
        positions: Sequence[int] | None = None,
        top_logprobs: int | None = None,
        **more: Any,
    ) -> Done:
        at = None if positions is None else frozenset(positions)
        seen = Capture(points=self.points(*points), positions=at, top_logprobs=top_logprobs)
        return await ended(self.engine.read(Read(session_id=session_id, capture=seen, **more)))

    async def probe(self, *, capture: Capture, **more: Any) -> Done:
        return await ended(self.engine.probe(Probe(capture=capture, **more)))

    def points(self, *names: str) -> tuple[Point, ...]:
        return parse_points(names, self.engine.model.config).points

    def append(
        self, session_id: str, token_ids: Sequence[int], *, atomic: bool = True, **more: Any
    ) -> Reply:
        command = Append(session_id=session_id, token_ids=tuple(token_ids), atomic=atomic, **more)
        return self.engine.append(command)

    def generate(
        self,
        session_id: str,
        max_tokens: int | None = None,
        *,
        atomic: bool = True,
        sampling: Sampling = GREEDY,
        **more: Any,
    ) -> Reply:
        command = Generate(
            session_id=session_id, max_tokens=max_tokens, sampling=sampling, atomic=atomic, **more
        )
        return self.engine.generate(command)

    async def appended(self, session_id: str, token_ids: Sequence[int], **more: Any) -> Done:
        return await ended(self.append(session_id, token_ids, **more))

    async def generated(self, session_id: str, max_tokens: int | None = None, **more: Any) -> Done:
        return await ended(self.generate(session_id, max_tokens, **more))

    # What there is to see.

    def session(self, session_id: str) -> Session:
        return self.engine.registry.find(session_id)

    def length(self, session_id: str) -> int:
        return self.session(session_id).past_length

    def places(self) -> set[str]:
        """The sessions that have a place in the cache."""
        return set(self.engine._thread.places._places)

    def n_places(self) -> int:
        return self.cache.ledger.n_slots - self.cache.free_places

    async def settled(self) -> None:
        """Wait until no request is left and the model thread has nothing more to do."""
        await self.engine._requests.none_left.wait()
        await eventually(lambda: self.engine.stats().running == 0)
        session_id = await self.open()  # one whole pass behind everything before
        await self.engine.delete(session_id)

    def check(self) -> None:
        """Prove the books, while nothing runs."""
        self.engine._thread.places.check()
        self.engine.registry.check()


async def ended(reply: Reply) -> Done:
    """All of a request, its records gathered, whether it was a stream or not."""
    records: list[StepRecord] = []
    async with reply:
        async for event in reply:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Progress):
                records.extend(event.records)
            else:
                records.extend(event.records)
                return Done(event.session, event.usage, tuple(records))
    raise AssertionError("a reply without a terminal event")


async def eventually(condition: Callable[[], bool]) -> None:
    """Let others work until the condition holds."""
    while not condition():  # noqa: ASYNC110  # another thread makes it true and has no asyncio.Event
        await asyncio.sleep(0.001)


async def happened(event: threading.Event) -> None:
    """Wait for another thread's event without holding up the loop."""
    await asyncio.to_thread(event.wait)


def gate(rig: Rig) -> Gated:
    """The gate of an engine that runs on a `Gated` model."""
    assert isinstance(rig.model, Gated)
    return rig.model


def assert_refused(kind: type[E], *calls: Callable[[], object]) -> list[E]:
    """Each of `calls` raises `kind`, at once; returns what was raised."""
    refusals = []
    for call in calls:
        with pytest.raises(kind) as refused:
            call()
        refusals.append(refused.value)
    return refusals


def ids_of(records: Sequence[StepRecord]) -> list[int]:
    return [record.token_id for record in records]


def some_ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50256), k=n)


def capture(*points: Any, **more: Any) -> Capture:
    return Capture(points=points, **more)


def pieces(n: int, config: GPT2Config = CONFIG) -> int:
    """Bytes of `n` pieces of the cache."""
    return n * PIECE * cache_shape(config, "float32").row_bytes


@asynccontextmanager
async def running(
    double: Callable[[Model], Watched] = Watched,
    *,
    checkpoint: Checkpoint = LIVELY,
    exact: bool = False,
    budget_bytes: int = 1 << 32,
    log: SessionLog | None = None,
    clock: Callable[[], float] = time.time,
    observer: Observer | None = None,
    **limits: int,
) -> AsyncIterator[Rig]:
    """An engine on `double` of a small model; all is proved in order when it is left."""
    bounds = Limits(**limits)
    cache = KVCache(
        cache_shape(checkpoint.config, "float32"),
        budget_bytes=budget_bytes,
        max_slots=bounds.max_sessions,
        piece=EXACT_PIECE if exact else PIECE,
    )
    real = GPT2(
        checkpoint,
        cache.buffers,
        dtype="float32",
        max_tokens=bounds.max_tokens,
        batch_invariant=exact,
    )
    model = double(real)
    engine = Engine(
        model=model,
        cache=cache,
        tokenizer=TOKENIZER,
        log=MemoryLog() if log is None else log,
        limits=bounds,
        clock=clock,
        observer=observer,
    )
    engine.start()
    rig = Rig(engine, model, cache)
    try:
        yield rig
        model.release()
        await engine._requests.none_left.wait()
    finally:
        model.release()
        await engine.close()
    rig.check()

"""Our engine without HTTP: `engine.facade` in this process, on the loop that the server uses too.

What a `Serve` or `Capture` case gives here is what a server could pass on at best. Sharing nothing
with a client, nothing is taken off its time.
"""

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from bench.cases import Activations, Capture, EngineSpec, Rebuild, Serve, Sweep
from bench.engines.base import Engine, token_ids
from bench.engines.studies import read_last, swept
from bench.load import Stream, patched_prompts, points_of, prompts, streams
from bench.modes import loaded
from bench.samples import WARM_UP, Sample, Sides, in_turns
from engine.commands import Append, Generate, Open, Truncate
from engine.commands import Capture as Captured
from engine.events import Done, Failed, Progress
from engine.facade import Engine as Facade
from engine.limits import Limits
from engine.studies.rows import Array
from model.points import Point
from model.sampling import Sampling
from server.loading import Loaded
from sessions.log import MemoryLog

T = TypeVar("T")

EMBEDDING = (Point("embedding"),)
GREEDY = Sampling(temperature=0)
TTL = 3600


class Alone(Engine):
    """A running engine and its loop, which runs only while something is asked."""

    def __init__(self, parts: Loaded) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._facade = self._run(_started(parts))

    def serve(self, case: Serve) -> list[Sample]:
        return [self._run(self._served(case)).per(case.n_streams * case.n_tokens)]

    def rebuild(self, case: Rebuild) -> list[Sample]:
        return self._run(self._rebuilt(case))

    def capture(self, case: Capture) -> Sides:
        opened = self._opened(prompts(case))
        sides = {asked: partial(self._burst, case, opened, asked) for asked in ("", *case.asked)}
        samples = in_turns(sides, case.n_turns, warm_up=0)
        self._run(self._delete(opened))
        return samples

    def sweep(self, case: Sweep) -> Sides:
        grid, sample = self.grid(case)
        return {"": [sample.per(grid.shape[0] * grid.shape[1])]}

    def grid(self, case: Sweep) -> tuple[Array, Sample]:
        """What a sweep answers, [layer, position, logit], and its time."""
        return self._run(self._swept(case))

    def activations(self, case: Activations) -> Sides:
        (session_id,) = opened = self._opened([token_ids(case.n_tokens)])

        def read(*, fresh: bool) -> Sample:
            work = read_last(self._facade, session_id, case.n_tokens, fresh=fresh)
            return self._run(_timed(work))[1]

        sides = {"": partial(read, fresh=False), "fresh": partial(read, fresh=True)}
        samples = in_turns(sides, case.steps)
        self._run(self._delete(opened))
        return samples

    def next_id(self, token_ids: Sequence[int]) -> int:
        return self._run(self._next_id(token_ids))

    def close(self) -> None:
        self._run(self._facade.close())
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _served(self, case: Serve) -> Sample:
        """From the first arrival to the last token."""
        work = asyncio.gather(*(self._stream(one) for one in streams(case)))
        opened, sample = await _timed(work)
        await self._delete(opened)
        return sample

    async def _stream(self, stream: Stream) -> str:
        await asyncio.sleep(stream.at)
        session_id = await self._open(stream.token_ids)
        told = await self._generate(session_id, stream.n_tokens, EMBEDDING)
        assert len(told) == stream.n_tokens
        return session_id

    def _burst(self, case: Capture, session_ids: Sequence[str], asked: str) -> Sample:
        points = points_of(asked, self._facade.model.config)
        sample = self._run(self._streamed(case, session_ids, points))
        return sample.per(case.n_sessions * case.n_tokens)

    async def _streamed(
        self, case: Capture, session_ids: Sequence[str], points: tuple[Point, ...]
    ) -> Sample:
        work = (self._generate(one, case.n_tokens, points) for one in session_ids)
        told, sample = await _timed(asyncio.gather(*work))
        assert all(len(ids) == case.n_tokens for ids in told)
        for one in session_ids:
            await self._facade.truncate(Truncate(session_id=one, to=case.context))
        return sample

    async def _swept(self, case: Sweep) -> tuple[Array, Sample]:
        session, source = [await self._open(ids) for ids in patched_prompts(case)]
        told = await _timed(swept(self._facade, case, session, source))
        await self._delete([session, source])
        return told

    async def _rebuilt(self, case: Rebuild) -> list[Sample]:
        """Two sessions in turn where there is room for one."""
        opened = [await self._open(token_ids(case.n_tokens, seed=i)) for i in range(2)]
        samples = [await self._touched(opened[i % 2]) for i in range(WARM_UP + case.steps)]
        await self._delete(opened)
        return samples[WARM_UP:]

    async def _touched(self, session_id: str) -> Sample:
        start = time.perf_counter()
        async with self._facade.append(Append(session_id=session_id, token_ids=(0,))) as reply:
            done = await reply.result()
        n_rows = done.usage.rebuilt_tokens
        return Sample((time.perf_counter() - start) / n_rows, 0.0)

    async def _next_id(self, token_ids: Sequence[int]) -> int:
        session_id = await self._open(token_ids)
        (told,) = await self._generate(session_id, 1, ())
        await self._delete([session_id])
        return told

    async def _open(self, token_ids: Sequence[int]) -> str:
        view = await self._facade.open(Open(token_ids=tuple(token_ids), ttl_seconds=TTL))
        return view.session.id

    def _opened(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        return [self._run(self._open(token_ids)) for token_ids in prompts]

    async def _generate(
        self, session_id: str, n_tokens: int, points: tuple[Point, ...]
    ) -> list[int]:
        """The ids of a stream of `n_tokens`."""
        command = Generate(
            session_id=session_id,
            max_tokens=n_tokens,
            sampling=GREEDY,
            ignore_eos=True,
            capture=Captured(points=points),
            atomic=False,
        )
        told: list[int] = []
        async with self._facade.generate(command) as reply:
            async for event in reply:
                match event:
                    case Progress(records=records) | Done(records=records):
                        told += [record.token_id for record in records]
                    case Failed(error=error):
                        raise error
        return told

    async def _delete(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            await self._facade.delete(session_id)


async def _timed(work: Awaitable[T]) -> tuple[T, Sample]:
    """What `work` returns, and its time."""
    start = time.perf_counter()
    result = await work
    return result, Sample(time.perf_counter() - start, 0.0)


async def _started(parts: Loaded) -> Facade:
    facade = Facade(
        model=parts.model,
        cache=parts.cache,
        tokenizer=parts.tokenizer,
        log=MemoryLog(),
        limits=Limits(),
    )
    facade.start()
    return facade


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Alone:
    return Alone(loaded(spec, directory, n_threads))

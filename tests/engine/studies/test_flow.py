"""Streams read in step, and many requests a bounded number at a time."""

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine.commands import Capture, Probe, Read
from engine.errors import NoRoom, QueueFull, StepFailed
from engine.studies.flow import Pairs, gather, in_order, in_step
from engine.studies.turns import Attempt, Turns
from model.points import Point
from tests.engine.rig import in_loop
from tests.engine.studies.scripted import Arrays, Scripted, some_numbers

P = Point("resid_post", 0)
ROWS = some_numbers(20, 8)


def answer(rows: np.ndarray, command: Read | Probe) -> Arrays:
    return {P: rows}


def reading(*, fresh: bool = False, points: tuple[Point, ...] = (P,)) -> Read:
    capture = Capture(points=points, positions=frozenset(range(20)))
    return Read(session_id="s", capture=capture, fresh=fresh, atomic=False)


@pytest.mark.parametrize("batches", [(3, 3), (1, 7), (7, 2), (50, 4)])
@in_loop
async def test_two_streams_are_paired_whatever_their_batches(batches: tuple[int, int]) -> None:
    engine = Scripted(lambda command: {P: ROWS if command == reading() else ROWS + 1})
    seen: list[int] = []

    def take(pairs: Pairs) -> None:
        for a, b in pairs:
            assert a.position == b.position
            np.testing.assert_array_equal(a.points[P] + 1, b.points[P])
            seen.append(a.position)

    real = engine.finish

    def finish(reply: Any, command: Any) -> None:
        engine.batch = batches[command == reading()]
        real(reply, command)

    engine.finish = finish  # type: ignore[method-assign]  # each stream its own batches
    left, right = await in_step(engine, reading(), reading(fresh=True), take)
    assert seen == list(range(20))
    assert (left.steps, right.steps) == (20, 20)
    assert not engine.cancelled


@in_loop
async def test_a_fault_in_one_stream_cancels_the_other() -> None:
    engine = Scripted(lambda command: {P: ROWS})
    engine.holds = True

    async def studied() -> None:
        await in_step(engine, reading(), reading(fresh=True), lambda pairs: None)

    task = asyncio.create_task(studied())
    while len(engine.running) < 2:  # noqa: ASYNC110  # the double tells nobody
        await asyncio.sleep(0)
    left, right = engine.running
    engine.refusals.append(StepFailed("x"))
    left.cancel()
    with pytest.raises(Exception, match="cancelled"):
        await task
    assert engine.cancelled == [left, right]


@in_loop
async def test_numbers_leave_the_event_loop_where_they_are_many() -> None:
    threads = set[threading.Thread]()
    for width, apart in ((8, False), (100_000, True)):
        rows = np.zeros((20, width), np.float32)
        engine = Scripted(partial(answer, rows), batch=5)
        threads.clear()
        reply = engine.read(reading())
        usage = await gather(reply, lambda records: threads.add(threading.current_thread()))
        assert usage.steps == 20
        assert (threading.current_thread() not in threads) == apart


class Crowd:
    """Attempts that end when they are told to, and how many are under way."""

    def __init__(self) -> None:
        self.under_way: dict[int, asyncio.Event] = {}
        self.most = 0
        self.tries: list[int] = []
        self.cancelled: list[int] = []
        self.refuses: Callable[[int], Exception | None] = lambda name: None

    def attempt(self, name: int) -> Attempt[int]:
        async def run() -> int:
            self.tries.append(name)
            if refusal := self.refuses(name):
                raise refusal
            ended = self.under_way[name] = asyncio.Event()
            self.most = max(self.most, len(self.under_way))
            try:
                await ended.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            finally:
                del self.under_way[name]
            return name

        return run

    async def end(self, name: int) -> None:
        while name not in self.under_way:  # noqa: ASYNC110  # another task makes it true
            await asyncio.sleep(0)
        self.under_way[name].set()


async def collected(crowd: Crowd, n: int, *, window: int) -> list[int]:
    async with aclosing(in_order(map(crowd.attempt, range(n)), Turns(), window=window)) as results:
        return [result async for result in results]


@in_loop
async def test_results_come_in_order_and_no_more_than_the_window_run() -> None:
    crowd = Crowd()
    task = asyncio.create_task(collected(crowd, 7, window=3))
    for name in (2, 1, 0, 3, 5, 4, 6):
        await crowd.end(name)
    assert await task == list(range(7))
    assert crowd.most == 3


@in_loop
async def test_results_that_nobody_takes_hold_their_places() -> None:
    crowd = Crowd()
    results = in_order(map(crowd.attempt, range(100)), Turns(), window=4)
    first = asyncio.create_task(anext(results))
    for name in range(4):
        await crowd.end(name)
    assert await first == 0
    for _ in range(50):
        await asyncio.sleep(0)
    assert crowd.tries == [0, 1, 2, 3]  # the window is full of what waits to be taken
    await results.aclose()


@in_loop
async def test_leaving_early_cancels_what_runs_and_begins_no_more() -> None:
    crowd = Crowd()
    results = in_order(map(crowd.attempt, range(10)), Turns(), window=3)
    first = asyncio.create_task(anext(results))
    await crowd.end(0)
    assert await first == 0
    await results.aclose()
    assert crowd.cancelled == [1, 2]
    assert not crowd.under_way
    assert crowd.tries == [0, 1, 2]


@in_loop
async def test_being_cancelled_while_waiting_cancels_all() -> None:
    crowd = Crowd()
    task = asyncio.create_task(collected(crowd, 10, window=3))
    while len(crowd.under_way) < 3:  # noqa: ASYNC110  # another task makes it true
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(crowd.cancelled) == [0, 1, 2]


@pytest.mark.parametrize("refusal", [QueueFull(2), NoRoom(needed_bytes=1, total_bytes=1)])
@in_loop
async def test_one_without_a_place_waits_for_one_of_its_own(refusal: Exception) -> None:
    crowd = Crowd()
    crowd.refuses = lambda name: refusal if len(crowd.under_way) == 2 else None
    task = asyncio.create_task(collected(crowd, 8, window=5))
    for _ in range(8):
        while not crowd.under_way:  # noqa: ASYNC110  # another task makes it true
            await asyncio.sleep(0)
        await crowd.end(next(iter(crowd.under_way)))
        await asyncio.sleep(0)
    assert await task == list(range(8))
    assert crowd.most == 2
    assert len(crowd.tries) > 8


@in_loop
async def test_those_without_a_place_try_again_only_when_one_has_ended() -> None:
    crowd = Crowd()
    crowd.refuses = lambda name: QueueFull(1) if crowd.under_way else None
    task = asyncio.create_task(collected(crowd, 4, window=4))
    for n_tries in (4, 6, 8, 9):  # two of those that are left, each time
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(crowd.tries) == n_tries
        await crowd.end(next(iter(crowd.under_way)))
    assert await task == list(range(4))
    assert len(crowd.tries) == 9


@in_loop
async def test_one_that_waits_hears_that_the_last_one_was_refused() -> None:
    async def refused(n_turns: int) -> int:
        for _ in range(n_turns):
            await asyncio.sleep(0)
        raise NoRoom(needed_bytes=1, total_bytes=1)

    attempts = in_order([partial(refused, 1), partial(refused, 5)], Turns())
    with pytest.raises(NoRoom):
        await anext(attempts)


@in_loop
async def test_without_one_of_its_own_in_the_engine_it_is_refused() -> None:
    crowd = Crowd()
    crowd.refuses = lambda name: QueueFull(0)
    with pytest.raises(QueueFull):
        await collected(crowd, 8, window=5)


@in_loop
async def test_a_fault_of_one_ends_all_and_leaves_no_task_unheard() -> None:
    crowd, unheard = Crowd(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, told: unheard.append(told))
    crowd.refuses = lambda name: StepFailed("planted") if name in (1, 2) else None
    task = asyncio.create_task(collected(crowd, 8, window=4))
    await crowd.end(0)
    with pytest.raises(StepFailed):
        await task
    gc.collect()
    assert not unheard
    assert crowd.cancelled == [3]

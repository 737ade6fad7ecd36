"""One engine in one process, idle on a pipe between calls.

A process of its own per engine, because two OpenMP runtimes in one process fight for the cores;
idle on a pipe, because then its threads sleep while another engine is measured.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from bench.cases import Case, EngineSpec, matching, side_of
from bench.samples import Sample, Sides
from server import logs

LOG_LEVEL = "warning"  # ours loads without saying how far it is

_SPAWN = get_context("spawn")


class WorkerError(Exception):
    """An engine raised; the message is its traceback."""


class Worker:
    """The driver's side of one engine."""

    def __init__(self, spec: EngineSpec, directory: Path, n_threads: int) -> None:
        """Start the process and load the engine."""
        self.spec = spec
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_serve, args=(theirs, spec, directory, n_threads), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer()

    def measure(self, case: Case) -> dict[str, list[Sample]]:
        """Samples of one call, by the names of the engine's sides. See `Engine.measure`."""
        sides = cast(Sides, self._call("measure", case))
        return {side_of(self.spec.name, side): samples for side, samples in sides.items()}

    def next_id(self, token_ids: Sequence[int]) -> int | None:
        """See `Engine.next_id`."""
        return cast(int | None, self._call("next_id", token_ids))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()

    def _call(self, method: str, argument: object) -> object:
        self._pipe.send((method, argument))
        return self._answer()

    def _answer(self) -> object:
        try:
            failure, result = self._pipe.recv()
        except EOFError:
            raise WorkerError(f"{self.spec.name}: the process died (out of memory?)") from None
        if failure:
            raise WorkerError(f"{self.spec.name}: {failure}")
        return result


class Crew:
    """The workers of the case at hand: who does not take part gives the memory back."""

    def __init__(self, specs: Sequence[EngineSpec], start: Callable[[EngineSpec], Worker]) -> None:
        self._specs = specs
        self._start = start
        self._at_work: dict[str, Worker] = {}

    def called_for(self, case: Case) -> list[Worker]:
        """Those that `case` names, started where they are not."""
        specs = matching(self._specs, case.engines)
        self._dismiss(set(self._at_work) - {spec.name for spec in specs})
        for spec in specs:
            if spec.name not in self._at_work:
                self._at_work[spec.name] = self._start(spec)
        return [self._at_work[spec.name] for spec in specs]

    def close(self) -> None:
        """End them all."""
        self._dismiss(list(self._at_work))

    def _dismiss(self, names: Iterable[str]) -> None:
        for name in names:
            self._at_work.pop(name).close()


def _serve(pipe: Connection, spec: EngineSpec, directory: Path, n_threads: int) -> None:
    from bench.engines.base import build

    logs.configure(LOG_LEVEL)
    try:
        with closing(build(spec, directory, n_threads)) as engine:
            pipe.send((None, None))
            while True:
                method, argument = pipe.recv()
                pipe.send((None, getattr(engine, method)(argument)))
    except EOFError:  # the driver closed its end
        return
    except Exception:
        pipe.send((traceback.format_exc(), None))


def in_own_process(module: str, function: str, *arguments: object) -> Any:
    """The result of `module.function(*arguments)` from a process that is gone afterwards.

    By name, so that what the module imports is never imported here.
    """
    with ProcessPoolExecutor(
        1, mp_context=_SPAWN, initializer=logs.configure, initargs=(LOG_LEVEL,)
    ) as pool:
        return pool.submit(_call, module, function, arguments).result()


def _call(module: str, function: str, arguments: Sequence[object]) -> Any:
    return getattr(import_module(module), function)(*arguments)

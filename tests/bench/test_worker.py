from pathlib import Path
from typing import cast

import pytest

from bench.cases import Case, Decode, EngineSpec, Rebuild
from bench.worker import Crew, Worker, WorkerError, in_own_process

READ, MODEL, ALONE = (EngineSpec(name, "float32") for name in ("read", "stepscope", "alone"))


def test_a_worker_measures_in_its_own_process_and_tells_failures(weights: Path) -> None:
    worker = Worker(READ, weights, 1)
    assert worker.next_id([1]) is None
    samples = worker.measure(Decode(2, 8, 3))
    assert [(name, len(own)) for name, own in samples.items()] == [(READ.name, 3)]
    with pytest.raises(WorkerError, match=r"read-float32: [\s\S]*RuntimeError"):
        worker.measure(Decode(-(10**9), 8, 3))
    worker.close()


def test_a_worker_that_cannot_load_says_so(weights: Path) -> None:
    with pytest.raises(WorkerError, match="no_such_engine"):
        Worker(EngineSpec("no_such_engine", "float32"), weights, 1)


def test_a_call_in_its_own_process_leaves_nothing_here() -> None:
    assert in_own_process("os", "getpid") != in_own_process("os", "getpid")


class FakeWorker:
    def __init__(self, spec: EngineSpec, log: list[str]) -> None:
        self.spec = spec
        self._log = log
        log.append(f"start {spec.library}")

    def close(self) -> None:
        self._log.append(f"close {self.spec.library}")


def called(crew: Crew, case: Case) -> list[str]:
    return [worker.spec.library for worker in crew.called_for(case)]


def test_only_those_of_the_case_at_hand_are_in_memory() -> None:
    log: list[str] = []
    crew = Crew([READ, MODEL, ALONE], lambda spec: cast(Worker, FakeWorker(spec, log)))
    assert called(crew, Decode(1, 8, 2)) == ["read", "stepscope"]
    assert called(crew, Decode(4, 8, 2, ("stepscope-*",))) == ["stepscope"]
    assert log == ["start read", "start stepscope", "close read"]
    assert called(crew, Rebuild(8, 2, ("alone-*",))) == ["alone"]
    assert log[3:] == ["close stepscope", "start alone"]
    crew.close()
    assert log[5:] == ["close alone"]

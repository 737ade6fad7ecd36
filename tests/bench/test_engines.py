"""The engines that the tests have the packages for do the same work on the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.cases import Case, Decode, EngineSpec, Prefill
from bench.engines.base import Engine, build, token_ids
from bench.worker import Worker, WorkerError
from tests.lively import save_lively

SPECS = [
    EngineSpec("stepscope", "float32"),
    EngineSpec("transformers", "float32", "dynamic"),
    EngineSpec("transformers", "float32", "static"),
]
CASES: list[Case] = [Decode(1, 8, 2), Decode(3, 20, 2), Prefill(12, 2)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    save_lively(directory / "huggingface")
    return directory


Build = Callable[[EngineSpec], Engine]


@pytest.fixture(scope="module")
def made(weights: Path) -> Build:
    engines: dict[str, Engine] = {}

    def make(spec: EngineSpec) -> Engine:
        if spec.name not in engines:
            engines[spec.name] = build(spec, weights, torch.get_num_threads())
        return engines[spec.name]

    return make


def test_all_engines_choose_the_same_id(made: Build) -> None:
    for n_tokens in (1, 7, 40):
        ids = token_ids(n_tokens, seed=n_tokens)
        assert len({made(spec).next_id(ids) for spec in SPECS}) == 1


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_measuring_gives_its_samples_and_leaves_nothing(
    made: Build, spec: EngineSpec, case: Case
) -> None:
    engine = made(spec)
    before = engine.next_id(token_ids(30))
    samples = engine.measure(case)
    assert len(samples) == case.steps
    assert all(sample.seconds > 0 for sample in samples)
    assert engine.next_id(token_ids(30)) == before


def test_ours_frees_its_cache(made: Build) -> None:
    from bench.engines.stepscope import Stepscope

    engine = made(SPECS[0])
    assert isinstance(engine, Stepscope)
    engine.measure(CASES[1])
    engine.measure(CASES[2])
    engine.cache.check()
    assert engine.cache.usage().bytes_used == 0


def test_a_worker_measures_in_its_own_process_and_tells_failures(weights: Path) -> None:
    worker = Worker(EngineSpec("read", "float32"), weights, 1)
    assert worker.next_id([1]) is None
    assert len(worker.measure(Decode(2, 8, 3))) == 3
    assert worker.measure(Prefill(8, 3)) == []
    with pytest.raises(WorkerError, match=r"read-float32: [\s\S]*RuntimeError"):
        worker.measure(Decode(-(10**9), 8, 3))
    worker.close()


def test_a_worker_that_cannot_load_says_so(weights: Path) -> None:
    with pytest.raises(WorkerError, match="no_such_engine"):
        Worker(EngineSpec("no_such_engine", "float32"), weights, 1)

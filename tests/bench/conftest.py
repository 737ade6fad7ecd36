from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bench.cases import EngineSpec
from bench.engines.base import Engine, build
from tests.lively import save_lively


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `bench.weights` makes it, of a small model."""
    directory = tmp_path_factory.mktemp("weights")
    save_lively(directory / "huggingface")
    return directory


@pytest.fixture(scope="session")
def made(weights: Path) -> Iterator[Callable[[EngineSpec], Engine]]:
    """Engines over these weights, each made when it is first asked for."""
    engines: dict[str, Engine] = {}

    def make(spec: EngineSpec) -> Engine:
        if spec.name not in engines:
            engines[spec.name] = build(spec, weights, torch.get_num_threads())
            stack.callback(engines[spec.name].close)
        return engines[spec.name]

    with ExitStack() as stack:
        yield make

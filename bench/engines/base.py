"""What every engine can do, and how one is made inside its own process."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from bench.cases import Case, EngineSpec
from bench.samples import Sample

N_VOCAB = 50257


class Engine(Protocol):
    """A model that is loaded, with no state between two calls."""

    def measure(self, case: Case) -> list[Sample]:
        """`case.steps` timed steps. What they need is made before them and freed after them."""
        ...

    def next_id(self, token_ids: Sequence[int]) -> int | None:
        """The greedy id after `token_ids`; None for a probe, which has no model."""
        ...


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Engine:
    """The engine of `spec` over the weights in `directory` (see `bench.weights`)."""
    module = import_module(f"bench.engines.{spec.library}")
    return cast(Engine, module.build(spec, directory, n_threads))


def token_ids(n_tokens: int, seed: int = 0) -> list[int]:
    """The same varied ids in every process."""
    return [(seed * 7919 + i * 104729 + 1) % N_VOCAB for i in range(n_tokens)]

"""What every engine can do, and how one is made inside its own process."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from bench.cases import (
    Activations,
    Capture,
    Case,
    Decode,
    EngineSpec,
    Prefill,
    Rebuild,
    Serve,
    Sweep,
)
from bench.samples import Sample, Sides

N_VOCAB = 50257


class Engine:
    """A model that is loaded, with no state between two calls.

    It measures the kinds of cases that name it (`Case.engines`). What the timed steps need is made
    before them and freed after them.
    """

    def measure(self, case: Case) -> Sides:
        """The samples of one call."""
        match case:
            case Decode():
                return {"": self.decode(case)}
            case Prefill():
                return {"": self.prefill(case)}
            case Rebuild():
                return {"": self.rebuild(case)}
            case Serve():
                return {"": self.serve(case)}
            case Capture():
                return self.capture(case)
            case Sweep():
                return self.sweep(case)
            case Activations():
                return self.activations(case)

    def decode(self, case: Decode) -> list[Sample]:
        raise NotImplementedError

    def prefill(self, case: Prefill) -> list[Sample]:
        raise NotImplementedError

    def rebuild(self, case: Rebuild) -> list[Sample]:
        raise NotImplementedError

    def serve(self, case: Serve) -> list[Sample]:
        raise NotImplementedError

    def capture(self, case: Capture) -> Sides:
        raise NotImplementedError

    def sweep(self, case: Sweep) -> Sides:
        raise NotImplementedError

    def activations(self, case: Activations) -> Sides:
        raise NotImplementedError

    def next_id(self, token_ids: Sequence[int]) -> int | None:
        """The greedy id after `token_ids`; None for a probe, which has no model."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop what would outlive this process or keep it from ending."""


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Engine:
    """The engine of `spec` over the weights in `directory` (see `bench.weights`)."""
    module = import_module(f"bench.engines.{spec.library}")
    return cast(Engine, module.build(spec, directory, n_threads))


def token_ids(n_tokens: int, seed: int = 0) -> list[int]:
    """The same varied ids in every process."""
    return [(seed * 7919 + i * 104729 + 1) % N_VOCAB for i in range(n_tokens)]

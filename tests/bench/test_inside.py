"""Looking inside: what is timed is what was asked for, in ours and in the peers."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch

from bench.cases import Activations, Capture, EngineSpec, Sweep, side_of
from bench.engines.alone import Alone
from bench.engines.base import Engine
from bench.engines.patching import by_layer, one_by_one
from bench.report import TARGETS
from tests.lively import in_transformers, lively_checkpoint

Build = Callable[[EngineSpec], Engine]

ALONE, HTTP = EngineSpec("alone", "float32"), EngineSpec("http", "float32")
PEER = EngineSpec("transformers", "float32", "dynamic")
ASKED = ("one", "residuals", "cheap", "all")
SMALL = Capture("capture", ASKED, 1, (), n_sessions=2, context=20, n_tokens=3)
SIDES = {
    ALONE: {side_of("alone-float32", asked) for asked in ("", *ASKED)},
    HTTP: {
        side_of(f"http-float32+{form}", asked)
        for form in ("sse", "frames")
        for asked in ("", *ASKED)
    },
    PEER: {PEER.name, f"{PEER.name}+hidden_states"},
}


def names(made: Build, spec: EngineSpec, case: Capture | Sweep | Activations) -> set[str]:
    """The sides that were measured, each with samples."""
    sides = made(spec).measure(case)
    assert all(sample.seconds > 0 for samples in sides.values() for sample in samples)
    assert all(sides.values())
    return {side_of(spec.name, side) for side in sides}


@pytest.mark.parametrize("spec", SIDES, ids=lambda spec: spec.name)
def test_streams_with_internals_come_whole(made: Build, spec: EngineSpec) -> None:
    assert names(made, spec, SMALL) == SIDES[spec]


def test_every_target_names_sides_that_are_measured() -> None:
    measured = set().union(*SIDES.values())
    of_capture = [target for target in TARGETS if target.cases.startswith("capture")]
    assert len(of_capture) == 13
    for target in of_capture:
        assert any(fnmatchcase(name, target.ours) for name in measured)
        assert set(target.others) <= measured


def test_all_fill_the_same_grid(made: Build) -> None:
    case, model = Sweep(9), in_transformers(lively_checkpoint())
    alone = made(ALONE)
    assert isinstance(alone, Alone)
    ours, _ = alone.grid(case)
    with torch.inference_mode():
        theirs = [
            torch.cat([one() for one in passes(model, case)]).view(2, 9, 2).numpy()
            for passes in (one_by_one, by_layer)
        ]
    assert ours.shape == (2, 9, 2)
    assert len(np.unique(ours)) > 20
    for grid in theirs:
        np.testing.assert_allclose(ours, grid, atol=1e-4, rtol=1e-5)


def test_a_sweep_is_timed_by_both(made: Build) -> None:
    assert names(made, ALONE, Sweep(5)) == {"alone-float32"}
    assert names(made, PEER, Sweep(5)) == {f"{PEER.name}+one-by-one", f"{PEER.name}+by-layer"}


def test_reading_is_timed_from_the_cache_and_anew(made: Build) -> None:
    case = Activations(40, 2)
    assert names(made, ALONE, case) == {"alone-float32", "alone-float32+fresh"}
    assert names(made, PEER, case) == {PEER.name}

"""The engines that the tests have the packages for do the same work on the same weights."""

from collections.abc import Callable

import pytest

from bench.cases import Case, Decode, EngineSpec, Prefill, Rebuild, Serve
from bench.engines.base import Engine, token_ids
from bench.engines.stepscope import Stepscope

MODELS = [
    EngineSpec("stepscope", "float32"),
    EngineSpec("stepscope", "float32", "exact"),
    EngineSpec("transformers", "float32", "dynamic"),
    EngineSpec("transformers", "float32", "static"),
]
ROUNDED = [
    EngineSpec("stepscope", "bfloat16"),
    EngineSpec("stepscope", "int8"),
    EngineSpec("stepscope", "int8", "kv16"),
]
SERVING = [EngineSpec("alone", "float32"), EngineSpec("http", "float32")]
TIGHT = EngineSpec("alone", "float32", "tight")
CASES: list[Case] = [Decode(1, 8, 2), Decode(3, 20, 2), Prefill(12, 2)]

Build = Callable[[EngineSpec], Engine]


def named(spec: EngineSpec) -> str:
    return spec.name


def test_all_engines_choose_the_same_id(made: Build) -> None:
    for n_tokens in (1, 7, 40):
        ids = token_ids(n_tokens, seed=n_tokens)
        assert len({made(spec).next_id(ids) for spec in [*MODELS, *SERVING, TIGHT]}) == 1


@pytest.mark.parametrize("spec", [*MODELS, *ROUNDED], ids=named)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_measuring_gives_its_samples_and_leaves_nothing(
    made: Build, spec: EngineSpec, case: Decode | Prefill
) -> None:
    engine = made(spec)
    before = engine.next_id(token_ids(30))
    samples = engine.measure(case)[""]
    assert len(samples) == case.steps
    assert all(sample.seconds > 0 for sample in samples)
    assert engine.next_id(token_ids(30)) == before


def test_ours_frees_its_cache(made: Build) -> None:
    engine = made(MODELS[0])
    assert isinstance(engine, Stepscope)
    engine.measure(CASES[1])
    engine.measure(CASES[2])
    engine.cache.check()
    assert engine.cache.usage().bytes_used == 0


def test_filled_sessions_continue_as_the_one_that_was_computed(made: Build) -> None:
    engine = made(MODELS[0])
    assert isinstance(engine, Stepscope)
    sessions = engine.filled(3, token_ids(20))
    chosen = engine.step(sessions, [5, 5, 6])
    assert chosen[0] == chosen[1] == engine.next_id([*token_ids(20), 5])
    assert chosen[2] == engine.next_id([*token_ids(20), 6])
    engine.close_all(sessions)


@pytest.mark.parametrize("spec", SERVING, ids=named)
def test_streams_come_whole_and_their_sessions_are_closed(made: Build, spec: EngineSpec) -> None:
    engine = made(spec)
    for _ in range(2):
        (sample,) = engine.measure(Serve(3, 5))[""]
        assert sample.seconds > 0
        assert sample.is_clean


def test_touching_an_evicted_session_is_measured_by_the_rows_it_rebuilds(made: Build) -> None:
    samples = made(TIGHT).measure(Rebuild(40, 2))[""]
    assert len(samples) == 2
    assert all(sample.seconds > 0 for sample in samples)


@pytest.mark.parametrize(
    ("spec", "case"), [(MODELS[0], Serve(1, 1)), (TIGHT, CASES[0])], ids=["model", "server"]
)
def test_an_engine_is_not_asked_what_it_cannot_measure(
    made: Build, spec: EngineSpec, case: Case
) -> None:
    with pytest.raises(NotImplementedError):
        made(spec).measure(case)

from pathlib import Path

import pytest

from bench.cases import ENGINES, EngineSpec, matching
from bench.modes import loaded, settings_of
from server.settings import Settings

OURS = matching(ENGINES, ["stepscope-*", "alone-*", "http-*"])


@pytest.mark.parametrize("spec", OURS, ids=lambda spec: spec.name)
def test_every_mode_is_one_that_the_server_has(spec: EngineSpec, weights: Path) -> None:
    settings = Settings.model_validate(settings_of(spec, weights, 1))
    assert (settings.dtype, settings.kv_dtype) == (spec.dtype, spec.kv_dtype)
    assert settings.batch_invariant == (spec.variant == "exact")


def test_tight_is_room_for_one_session_and_no_second(weights: Path) -> None:
    cache = loaded(EngineSpec("alone", "float32", "tight"), weights, 1).cache
    assert cache.usage().bytes_total == cache.bytes_for(cache.shape.n_ctx)

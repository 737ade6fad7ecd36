from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cases import EngineSpec
from bench.engines.stepscope import Stepscope, build
from bench.sharing import fork_row, prefix_row


@pytest.fixture
def engine(weights: Path) -> Iterator[Stepscope]:
    engine = build(EngineSpec("stepscope", "float32"), weights, 1)
    yield engine
    engine.cache.check()
    assert engine.cache.usage().bytes_used == 0


def test_a_fork_and_its_first_write_are_timed_apart(engine: Stepscope) -> None:
    row = fork_row(engine, "ours", 40)
    assert row["tokens"] == "40"
    assert {"fork_us", "first_write_us"} <= set(row)


def test_forks_of_a_prefix_hold_it_once(engine: Stepscope) -> None:
    row = prefix_row(engine, "ours", 4, prefix=32, steps=2)
    per_token = engine.cache.shape.row_bytes / 1e6
    assert row["apart_mb"] == pytest.approx(4 * 64 * per_token)
    assert row["forks_mb"] == pytest.approx((64 + 4 * 32) * per_token)

"""From settings to a model that is ready to step."""

from pathlib import Path

import pytest

from server.errors import BudgetTooSmall
from server.loading import LoadingProgress, facts_of, load
from server.settings import Settings
from tests.lively import lively_checkpoint


@pytest.mark.parametrize(
    ("model", "name", "source"),
    [
        ("random:tiny", "random:tiny", "random"),
        ("owner/name", "owner/name", "hub"),
        ("weights", "weights", "directory"),
        (".", "here", "directory"),
    ],
)
def test_facts_tell_the_kind_of_source_and_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str, source: str
) -> None:
    here = tmp_path / "here"
    (here / "weights").mkdir(parents=True)
    monkeypatch.chdir(here)
    facts = facts_of(Settings(model=model), lively_checkpoint())
    assert (facts.name, facts.source) == (name, source)


@pytest.mark.parametrize(("kv_budget", "fits"), [(656 * 1024, True), (639 * 1024, False)])
def test_m01_a_budget_below_one_session_stops_the_start(kv_budget: int, fits: bool) -> None:
    settings = Settings(model="random:tiny", threads=1, kv_budget=kv_budget)
    if fits:
        load(settings, LoadingProgress())
        return
    with pytest.raises(BudgetTooSmall, match=r"less than one session of 1024 tokens"):
        load(settings, LoadingProgress())

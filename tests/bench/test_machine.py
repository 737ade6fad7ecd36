import pytest

from bench import machine
from bench.cases import EngineSpec


def test_a_peer_takes_part_where_its_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = EngineSpec("llamacpp", "q8_0")
    monkeypatch.setitem(machine.MODULES, "llamacpp", ("json", "ast"))
    assert machine.has_packages_of(peer)
    monkeypatch.setitem(machine.MODULES, "llamacpp", ("json", "no_such_module"))
    assert not machine.has_packages_of(peer)
    assert machine.has_packages_of(EngineSpec("stepscope", "float32"))


def test_the_page_says_which_packages_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("numpy", "no-such-package"))
    told = machine.facts(2, "built somehow")
    assert told["packages"].startswith("numpy ")
    assert told["packages"].endswith("no-such-package not installed: not measured")
    assert told["torch"] == "built somehow"

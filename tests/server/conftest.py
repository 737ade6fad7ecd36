import os

import pytest

from embedding.tokenizer import Tokenizer
from tests.server.forking import LIVELY


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("STEPSCOPE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every server load weights that would show a bug."""
    monkeypatch.setattr("server.loading.load_checkpoint", lambda *_args, **_named: LIVELY)

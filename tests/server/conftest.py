import os

import pytest

from embedding.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("STEPSCOPE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer()

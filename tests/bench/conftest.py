from pathlib import Path

import pytest

from tests.lively import save_lively


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `bench.weights` makes it, of a small model."""
    directory = tmp_path_factory.mktemp("weights")
    save_lively(directory / "huggingface")
    return directory

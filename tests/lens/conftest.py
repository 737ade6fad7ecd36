from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _offline_and_silent() -> Iterator[None]:
    """Before TransformerLens is imported: it asks no hub and draws no bars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TQDM_DISABLE", "1")
        yield

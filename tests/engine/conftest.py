from collections.abc import Iterator

import pytest
import structlog
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The models here are so small that a second thread only waits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _short_tracebacks() -> Iterator[None]:
    """The default ones show every local of every frame, at a second for each planted fault."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.dev.set_exc_info, renderer])
    yield
    structlog.reset_defaults()

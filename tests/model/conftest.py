import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The models here are so small that a second thread only waits."""
    torch.set_num_threads(1)

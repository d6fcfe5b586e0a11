import pytest
import torch

from tests.tiny import CPU


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available() and "gpu" in item.path.parent.name:
        pytest.skip("there is no CUDA device here")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU

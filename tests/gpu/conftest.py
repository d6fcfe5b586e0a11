import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())

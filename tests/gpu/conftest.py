from collections.abc import Iterator

import pytest
import torch

from bench.gpu.setting import release


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")


@pytest.fixture(autouse=True, scope="module")
def memory_of_this_module_alone() -> Iterator[None]:
    """Give back what a module's models took: other processes test on the same GPU."""
    yield
    release()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())

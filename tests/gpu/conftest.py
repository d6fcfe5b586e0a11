from collections.abc import Iterator

import pytest
import torch

from bench.gpu.setting import release
from tests.interpreted import LAGGING_GPU, ON_GPU


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not ON_GPU and not LAGGING_GPU:
        pytest.skip("there is no CUDA device here")


@pytest.fixture(autouse=True, scope="module")
def memory_of_this_module_alone() -> Iterator[None]:
    """Give back what a module's models took: other processes test on the same GPU."""
    yield
    release()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())

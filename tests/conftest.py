from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # the models are so small that a second thread costs more than it brings


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-table", action="store_true", help="write what was measured to docs/models.md")

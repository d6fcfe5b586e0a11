"""Launches go to the device of their tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from localllm.runtime.kernels.gpu import launch
from localllm.runtime.kernels.gpu.launch import Gpu


class Kernel:
    """Notes on which device it is launched."""

    def __init__(self, current: list[int]):
        self.current, self.launched = current, list[int]()

    def __getitem__(self, grid: object) -> "Kernel":
        return self

    def __call__(self, **arguments: Any) -> None:
        self.launched.append(self.current[-1])


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device of a machine with two GPUs, the last of a stack."""
    devices = [0]

    @contextmanager
    def device(index: torch.device) -> Iterator[None]:
        devices.append(index.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "_gpu", lambda index: Gpu(90, 132))
    return devices


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(current: list[int], index: int) -> None:
    kernel = Kernel(current)
    launch.launch_kernel(kernel, (1,), 4, device=torch.device("cuda", index))
    assert kernel.launched == [index]
    assert current == [0]

"""Launches go to the device of their tensors, and start early only where that is supported and wanted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from localllm.runtime.kernels.gpu import launch
from localllm.runtime.kernels.gpu.launch import GPUS, Gpu, record_launches, uses_pdl, without_pdl
from localllm.runtime.kernels.gpu.norms import rms_norm


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


def pdl_of(arch: int) -> set[bool]:
    x, weight = torch.empty(1, 64, device="meta"), torch.empty(64, device="meta")
    with record_launches(GPUS[arch]) as launches:
        rms_norm(x, weight, 1e-5)
    assert launches
    for each in launches:
        assert each.arguments["PDL"] == each.options.get("launch_pdl", False)
    return {each.arguments["PDL"] for each in launches}


def test_kernels_start_early_from_sm_90_on() -> None:
    assert pdl_of(80) == pdl_of(89) == {False}
    assert pdl_of(90) == pdl_of(120) == {True}


def test_no_kernel_starts_early_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_pdl():
        assert pdl_of(90) == {False}
    assert pdl_of(90) == {True}
    monkeypatch.setenv("LOCALLLM_PDL", "off")
    launch.pdl_setting.cache_clear()
    try:
        assert pdl_of(90) == {False} and not uses_pdl(torch.device("cpu"))
    finally:
        launch.pdl_setting.cache_clear()

import math
from pathlib import Path

import pytest
import torch

from localllm.device import container_bytes, free_bytes, peak_bytes, resolve_device, resolve_dtype
from localllm.errors import NoSuchDevice, UsageError

CPU = torch.device("cpu")


def test_the_cpu_is_always_here() -> None:
    assert resolve_device("cpu") == CPU
    assert free_bytes(CPU) > 0
    assert peak_bytes(CPU) > 10_000_000


@pytest.mark.parametrize("name", ["", "gpu", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "CUDA"])
def test_a_name_that_means_nothing(name: str) -> None:
    with pytest.raises(UsageError):
        resolve_device(name)


def test_a_device_that_is_not_here_is_never_replaced() -> None:
    with pytest.raises(NoSuchDevice):
        resolve_device("cuda:999")


def test_dtypes_are_kept_where_they_run_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda fast=fast: fast)
        assert resolve_dtype("auto", "BF16", CPU) == (torch.bfloat16 if fast else torch.float32)
        assert resolve_dtype("auto", "F16", CPU) == torch.float32
        assert resolve_dtype("auto", "F32", CPU) == torch.float32
        assert resolve_dtype("float16", "F32", CPU) == torch.float16
    with pytest.raises(UsageError):
        resolve_dtype("int8", "F32", CPU)


def test_the_memory_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert container_bytes(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert container_bytes(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("100\n")
    assert container_bytes(tmp_path) == 0

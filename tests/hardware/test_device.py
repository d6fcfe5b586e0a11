import math
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localllm.errors import NoSuchDevice, UsageError
from localllm.hardware import device, processor
from localllm.hardware.device import (
    Gpu,
    activation_bits_for,
    container_bytes,
    container_memory,
    count_nvidia_devices,
    device_name,
    explain_no_gpu,
    explain_unused_gpus,
    free_bytes,
    has_kernels,
    list_gpus,
    machine_bytes,
    nvidia_driver,
    peak_bytes,
    reset_peak_bytes,
    resolve_device,
    resolve_dtype,
    total_bytes,
    usable_cores,
)

CPU = torch.device("cpu")


def test_the_cpu_is_always_available() -> None:
    assert resolve_device("cpu") == CPU
    assert free_bytes(CPU) > 0
    assert peak_bytes(CPU) > 10_000_000


@pytest.mark.parametrize("name", ["", "gpu", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "CUDA"])
def test_an_unknown_device_name(name: str) -> None:
    with pytest.raises(UsageError):
        resolve_device(name)


def test_an_absent_device_is_never_replaced() -> None:
    with pytest.raises(NoSuchDevice):
        resolve_device("cuda:999")


@pytest.mark.parametrize(
    ("torch_cuda", "torch_rocm", "driver", "plugged_in", "hidden", "said"),
    [
        (None, "6.4", None, 0, None, "torch, made for ROCm 6.4, detects no AMD GPU"),
        (None, None, None, 1, None, "this version of torch supports only CPUs"),
        ("12.8", None, None, 1, None, "there is an NVIDIA GPU, but no driver is loaded"),
        ("12.8", None, None, 0, None, "no NVIDIA GPU was found, but no driver is loaded"),
        ("12.8", None, "470.10", 1, None, "torch, made for CUDA 12.8, cannot use the driver 470.10"),
        ("12.8", None, "575.57", 1, "", "CUDA_VISIBLE_DEVICES hides all GPUs"),
    ],
)
def test_the_reason_for_no_gpu_is_explained(
    monkeypatch: pytest.MonkeyPatch,
    torch_cuda: str | None,
    torch_rocm: str | None,
    driver: str | None,
    plugged_in: int,
    hidden: str | None,
    said: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert explain_no_gpu(torch_cuda, torch_rocm, driver, plugged_in) == f"there is no CUDA device: {said}"


def test_a_gpu_is_resolved_exactly_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine with two GPUs, the second of which this torch does not support."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (5, 2)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["H200", "GTX 980"][index])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    assert resolve_device("auto") == resolve_device("cuda") == resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(NoSuchDevice, match="no kernels for cuda:1, the GTX 980; install one that has"):
        resolve_device("cuda:1")
    with pytest.raises(NoSuchDevice, match="there is no device cuda:2; here are cuda:0 to cuda:1"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: [(70, 100), (3, 4)][getattr(gpu, "index", gpu)])
    assert list_gpus() == [
        Gpu(0, "H200", "sm_90", "9.0", runs=True, memory_bytes=100, free_bytes=70),
        Gpu(1, "GTX 980", "sm_52", "5.2", runs=False, memory_bytes=4, free_bytes=3),
    ]
    second = torch.device("cuda", 1)
    assert machine_bytes(second) == (70, 3) and total_bytes(second) == 4
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (5, 2))
    assert resolve_device("auto") == CPU


@pytest.mark.parametrize(
    ("arch", "fault"),
    [
        ("gfx942:sramecc+:xnack-", None),
        ("gfx1201", None),
        ("gfx1030", "is gfx1030, and the kernels need gfx90a, gfx94x, gfx95x, gfx11xx or gfx12xx"),
        ("gfx1151", "this torch has no kernels for cuda:0, the Radeon"),
    ],
)
def test_a_gpu_of_amd_is_taken_if_kernels_compile_for_it(
    monkeypatch: pytest.MonkeyPatch, arch: str, fault: str | None
) -> None:
    """ROCm's builds of torch call the device cuda, and report the compute capability of no NVIDIA GPU."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Radeon")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=arch))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx942", "gfx1030", "gfx1201"])
    if fault is None:
        assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
        return
    assert resolve_device("auto") == CPU
    with pytest.raises(NoSuchDevice, match=fault):
        resolve_device("cuda")


def test_a_gpu_that_is_too_old_is_refused_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels need bfloat16; without them every step would dequantize all weights."""
    capabilities = [(7, 5), (8, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["Tesla T4", "A100"][index])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
    with pytest.raises(NoSuchDevice, match="cuda:0, the Tesla T4, is sm_75, and the kernels need sm_80 or newer"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cuda", 1)
    assert explain_unused_gpus("auto") == ""
    capabilities.pop()
    assert resolve_device("auto") == CPU
    assert explain_unused_gpus("auto") == "cuda:0, the Tesla T4, is sm_75, and the kernels need sm_80 or newer"
    assert explain_unused_gpus("cpu") == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert explain_unused_gpus("auto") == ""


def test_dtypes_are_kept_where_they_run_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "forced_level", lambda: None)
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
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 100\n")  # makes room when it is wanted
    assert container_bytes(tmp_path) == 800
    (tmp_path / "memory.max").write_text("100\n")
    assert container_bytes(tmp_path) == 0
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("300\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")  # the first version of control groups
    assert container_memory(tmp_path) == (1000, 300)
    (tmp_path / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50\nshmem 7\n")
    assert container_memory(tmp_path) == (1000, 250)
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert container_memory(tmp_path) is None


def test_the_cores_of_a_container_count(tmp_path: Path) -> None:
    cores = usable_cores(tmp_path)
    assert cores == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path) == cores
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1


def test_a_processor_has_a_name() -> None:
    assert device_name(CPU)


def test_nvidia_devices_are_counted_without_their_driver(tmp_path: Path) -> None:
    devices = {"gpu": ("0x10de", "0x030000"), "compute": ("0x10de", "0x030200"), "sound": ("0x10de", "0x040300")}
    for name, (vendor, kind) in (devices | {"other": ("0x1002", "0x030000")}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    (tmp_path / "gone").mkdir()
    assert count_nvidia_devices(tmp_path) == 2
    assert count_nvidia_devices(tmp_path / "no such folder") == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57  Release Build\nGCC version: 12.3.0",
            "575.57",
        ),
        ("nothing of the kind", None),
    ],
)
def test_the_version_of_the_driver(tmp_path: Path, text: str, version: str | None) -> None:
    assert nvidia_driver(tmp_path / "version") is None
    (tmp_path / "version").write_text(text)
    assert nvidia_driver(tmp_path / "version") == version


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_86", "sm_90"], True),
        ((7, 5), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "sm_90"], False),  # a GPU that is newer than this torch
        ((12, 0), ["sm_80", "compute_90"], True),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((10, 0), ["sm_80", "sm_90a", "compute_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 1), ["compute_100f"], False),
        ((9, 0), [], False),
        ((9, 0), ["gfx90a"], False),
    ],
)
def test_kernels_run_on_their_own_generation(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert has_kernels(*capability, architectures) is runs


def test_the_gpus_are_those_that_torch_counts() -> None:
    assert len(list_gpus()) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_a_system_without_linux_files_has_figures_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "STATUS", tmp_path / "none")
    monkeypatch.setattr(device, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    assert not reset_peak_bytes(CPU) and peak_bytes(CPU) > 10_000_000
    monkeypatch.setattr(Path, "read_text", lambda path: "processor : 0\nCPU part : 0xd40\n")  # of Arm
    assert device_name(CPU) == (platform.processor() or platform.machine())


@pytest.mark.parametrize(
    ("name", "requested", "dtype", "bits"),
    [
        ("auto", "auto", "float32", 16),
        ("auto", "float32", "float32", 24),
        ("auto", "auto", "bfloat16", 16),
        ("auto", "bfloat16", "bfloat16", 16),
        ("8", "float32", "float32", 8),
        ("24", "auto", "bfloat16", 24),
    ],
)
def test_requested_activation_bits_are_kept(name: str, requested: str, dtype: str, bits: int) -> None:
    assert activation_bits_for(name, requested, dtype) == bits


def test_activations_of_other_bits_are_refused() -> None:
    with pytest.raises(UsageError, match="activations of '12' bits are not supported; use auto, 24, 16, 8"):
        activation_bits_for("12", "auto", "float32")

"""The devices of this machine, their memory, and the dtypes that run well on them.

torch is imported inside functions, so that commands that need no device need no torch.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import NoSuchDevice, UsageError
from localllm.hardware import processor
from localllm.hardware.catalog import MIN_GPU_ARCH

if TYPE_CHECKING:
    import torch

CONTROL_GROUPS = Path("/sys/fs/cgroup")
CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
UNLIMITED_BYTES = 2**60  # version 1 of control groups represents no limit as 2**63 minus a page
NVIDIA, DISPLAY = "0x10de", "0x03"  # a vendor and a class of PCI devices
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("int8", "fp8", "k8v4", "int4")  # of keys and values, besides the model's own dtype
ACTIVATIONS = ("auto", "24", "16", "8")  # bits of activations that meet packed weights on a CPU
NO_GPU_REMEDY = "leave --device out or name cpu; `localllm doctor` says more"
AMD_ARCHS = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")  # prefixes: CDNA 2 and RDNA 3, and later


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is the first GPU that models run on, otherwise the CPU.

    Any other name is used literally and never replaced. Raises NoSuchDevice if the device is not available or too
    old, and UsageError for an invalid name.
    """
    import torch

    if name == "cpu":
        return torch.device(name)
    if name != "auto" and not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise UsageError(f"{name!r} is not a device", "use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        usable = (index for index in range(count) if gpu_fault(index) is None)
        index = next(usable, None)
        return torch.device("cpu") if index is None else torch.device("cuda", index)
    index = int(name.partition(":")[2] or 0)
    if not count:
        rocm, cuda = torch.version.hip, torch.version.cuda
        raise NoSuchDevice(explain_no_gpu(cuda, rocm, nvidia_driver(), count_nvidia_devices()), NO_GPU_REMEDY)
    if index >= count:
        raise NoSuchDevice(f"there is no device {name}", f"here are cuda:0 to cuda:{count - 1}")
    if fault := gpu_fault(index):
        raise NoSuchDevice(*fault)
    return torch.device("cuda", index)


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank: the CPU of all, or the GPU that many behind the one of rank 0."""
    import torch

    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)


def gpu_fault(index: int) -> tuple[str, str] | None:
    """Return why models do not run on a GPU of this machine, and a remedy; None if they do."""
    import torch

    title = f"cuda:{index}, the {torch.cuda.get_device_name(index)}"
    if not has_torch_kernels(index):
        return f"this torch has no kernels for {title}", f"install one that has; {NO_GPU_REMEDY}"
    arch = arch_name(index)
    if required := required_arch(arch):
        return f"{title}, is {arch}, and the kernels need {required}", NO_GPU_REMEDY
    return None


def arch_name(index: int) -> str:
    """Return the architecture of a GPU, such as sm_90 (NVIDIA) or gfx942 (AMD)."""
    import torch

    if torch.version.hip:
        return torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def required_arch(name: str) -> str | None:
    """Return what the Triton kernels need instead of an architecture; None if they run on it."""
    if name.startswith("sm_"):
        fits = int(name.removeprefix("sm_")) >= MIN_GPU_ARCH
        return None if fits else f"sm_{MIN_GPU_ARCH} or newer"
    return None if name.startswith(AMD_ARCHS) else "gfx90a, gfx94x, gfx95x, gfx11xx or gfx12xx"


def explain_unused_gpus(name: str) -> str:
    """Return why `auto` is the CPU although there are GPUs; empty if there are none, or one is used.

    name: as for `resolve_device`
    """
    import torch

    if name != "auto" or not torch.cuda.is_available():
        return ""
    faults = [gpu_fault(index) for index in range(torch.cuda.device_count())]
    return "" if None in faults else "; ".join(fault[0] for fault in faults if fault)


def has_torch_kernels(index: int) -> bool:
    """Return whether this torch has kernels for the GPU."""
    import torch

    if torch.version.hip:
        return arch_name(index) in torch.cuda.get_arch_list()
    return has_kernels(*torch.cuda.get_device_capability(index), torch.cuda.get_arch_list())


def explain_no_gpu(torch_cuda: str | None, torch_rocm: str | None, driver: str | None, plugged_in: int) -> str:
    """Return why there is no CUDA device, as torch calls those of AMD, too.

    torch_cuda, torch_rocm: versions of torch's build, None without; driver: NVIDIA's version, None if not loaded
    """
    if torch_rocm is not None:
        return f"there is no CUDA device: torch, made for ROCm {torch_rocm}, detects no AMD GPU"
    if torch_cuda is None:
        return "there is no CUDA device: this version of torch supports only CPUs"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "there is no CUDA device: CUDA_VISIBLE_DEVICES hides all GPUs"
    if driver is None:
        detected = "there is an NVIDIA GPU" if plugged_in else "no NVIDIA GPU was found"
        return f"there is no CUDA device: {detected}, but no driver is loaded"
    return f"there is no CUDA device: torch, made for CUDA {torch_cuda}, cannot use the driver {driver}"


@contextmanager
def device_context(device: torch.device) -> Iterator[None]:
    """Make the device this thread's default for allocations, launches and captures."""
    import torch

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def reserve_bytes(device: torch.device, size: int) -> None:
    """Reserve memory of a GPU in torch's allocator, for later tensors. Raises torch.OutOfMemoryError."""
    import torch

    if device.type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)


def release_cached(device: torch.device) -> None:
    """Release the memory that torch's allocator caches on a GPU."""
    import torch

    if device.type == "cuda":
        with suppress(RuntimeError):  # a failed GPU releases nothing before the process ends
            torch.cuda.empty_cache()


def resolve_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of `dtype_for`."""
    import torch

    return getattr(torch, dtype_for(name, stored, device.type))


def dtype_for(name: str, stored: str, device_type: str) -> str:
    """Return the dtype to compute in; `auto` is the stored one, except on a CPU without fast 16-bit arithmetic.

    stored: dtype of the weights, by safetensors' name; device_type: `cpu`, for this machine's, or `cuda`. Raises
    UsageError for an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UsageError(f"there is no dtype {name!r}", f"use auto, {', '.join(DTYPES)}")
        return name
    preferred = processor.NARROW_DTYPES.get(stored, "float32")
    if device_type == "cpu" and preferred != "float32":
        import torch

        limited = processor.forced_level() in ("avxvnni", "avx2", "baseline")  # levels without 16-bit arithmetic
        if preferred == "float16" or limited or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "float32"
    return preferred


def activation_bits_for(name: str, requested_dtype: str, dtype: str) -> int:
    """Bits that a CPU rounds activations to, within each group of columns, where they meet packed weights.

    name: of ACTIVATIONS. `auto` keeps all that a dtype holds where that dtype was requested. Where float32 came
    only of `auto`, it keeps 16 bits, which is less than a hundredth of what rounding the weights lost.
    Raises UsageError for an unknown name.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"activations of {name!r} bits are not supported", f"use {', '.join(ACTIVATIONS)}")
    if name != "auto":
        return int(name)
    return 24 if dtype == requested_dtype == "float32" else 16


def kv_dtype_for(name: str, dtype: str) -> str:
    """Return the dtype of keys and values; `auto` is the model's dtype, never fewer bits.

    Raises UsageError for an unknown name, and for a float dtype other than the model's.
    """
    if name == "auto":
        return dtype
    if name != dtype and name not in KV_DTYPES:
        if name in DTYPES:
            message = f"keys and values cannot be in {name}, as the model computes in {dtype}"
        else:
            message = f"there is no dtype {name!r} for keys and values"
        raise UsageError(message, f"use auto, {dtype}, {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}")
    return name


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, as for `resolve_dtype`: float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def device_count(device: torch.device) -> int:
    """Return the number of devices of this type in the machine: its GPUs, or 1 for a CPU."""
    import torch

    return torch.cuda.device_count() if device.type == "cuda" else 1


def machine_bytes(device: torch.device) -> tuple[int, ...]:
    """Return the free memory of each device of this type in the machine, in bytes."""
    import torch

    if device.type == "cpu":
        return (free_bytes(device),)
    return tuple(free_bytes(torch.device(device.type, index)) for index in range(device_count(device)))


def total_bytes(device: torch.device) -> int:
    """Return the total memory of a device in bytes, within a container's limit."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limit, _ = container_memory() or (math.inf, 0)
    return int(min(psutil.virtual_memory().total, limit))


def free_host_bytes() -> int:
    """Return the free main memory in bytes, within a container's limit."""
    import psutil

    return int(min(psutil.virtual_memory().available, container_bytes()))


def anonymous_bytes() -> int:
    """Return this process's memory in bytes without mapped files, if the system distinguishes them."""
    import psutil

    used = psutil.Process().memory_info()
    return used.rss - getattr(used, "shared", 0)


def container_bytes(groups: Path = CONTROL_GROUPS) -> float:
    """Return the memory that a Linux container's limit leaves; infinity without one."""
    limit, used = container_memory(groups) or (math.inf, 0)
    return max(0, limit - used)


def container_memory(groups: Path = CONTROL_GROUPS) -> tuple[int, int] | None:
    """Return limit and usage of a Linux container in bytes; None without a limit. Supports both control group
    versions.

    Inactive file pages are excluded from usage, because they are reclaimed on demand.
    """
    version_2 = [groups / f"memory.{name}" for name in ("max", "current", "stat")]
    version_1 = [groups / f"memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")]
    for limit, used, parts in (version_2, version_1):
        with suppress(OSError, ValueError):  # ValueError: `max`
            limit_bytes = int(limit.read_text())
            if limit_bytes < UNLIMITED_BYTES:
                return limit_bytes, max(0, int(used.read_text()) - _inactive_file_bytes(parts))
    return None


def _inactive_file_bytes(parts: Path) -> int:
    """Return the inactive file pages of this group and its descendants."""
    try:
        statistics = dict(line.split() for line in parts.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))


def usable_cores(groups: Path = CONTROL_GROUPS) -> float:
    """Return the cores that this process may use at once, by affinity or a container's quota, for example 1.5."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = map(int, (groups / "cpu.max").read_text().split())
        return min(cores, quota / period)
    with suppress(OSError, ValueError):
        quota, period = (int((groups / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return min(cores, quota / period) if quota > 0 else cores
    return cores


def device_name(device: torch.device) -> str:
    """Return the name that a GPU or processor reports."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """Return the processor's name; on Arm, for which Linux reports none, the architecture."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Return the processor features that torch uses, vector extensions first, and the LOCALLLM_CPU level, if
    set.
    """
    import torch

    fast_bfloat16 = ["bfloat16"] if dtype_for("auto", "BF16", "cpu") == "bfloat16" else []
    tiles = ["AMX"] if torch.cpu._is_amx_tile_supported() else []
    level = processor.forced_level()
    limit = [f"LOCALLLM_CPU={level}"] if level else []
    return [torch.backends.cpu.get_cpu_capability(), *fast_bfloat16, *tiles, *limit]


def processor_features(device: torch.device) -> str:
    """Return what the bits of results depend on: the features of a processor, or the name of a GPU."""
    return " ".join(cpu_features()) if device.type == "cpu" else device_name(device)


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch detects."""

    index: int
    name: str
    arch: str  # sm_90 or gfx942
    capability: str  # 9.0
    runs: bool  # torch has kernels for it
    memory_bytes: int
    free_bytes: int


def list_gpus() -> list[Gpu]:
    """Return all GPUs that torch can use, in its order."""
    import torch

    def gpu(index: int) -> Gpu:
        free, memory = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name, runs = torch.cuda.get_device_name(index), has_torch_kernels(index)
        return Gpu(index, name, arch_name(index), f"{major}.{minor}", runs, memory, free)

    return [gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def has_kernels(major: int, minor: int, architectures: Iterable[str]) -> bool:
    """Return whether code for one of the architectures runs on a GPU of this capability.

    architectures: as in `torch.cuda.get_arch_list`. Machine code (`sm_86`) runs on GPUs of the same major version
    that are not older, PTX (`compute_90`) on all that are not older; with suffix `a` (`sm_90a`), both run on that
    capability only, with `f` on its major version. Source: NVIDIA's manual of nvcc, "GPU Compilation".
    """

    def runs(architecture: str) -> bool:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if not match:
            return False
        oldest = (int(match[2]), int(match[3]))
        if match[4] == "a":
            return oldest == (major, minor)
        same_major_only = match[1] == "sm" or match[4] == "f"
        return oldest <= (major, minor) and (oldest[0] == major or not same_major_only)

    return any(map(runs, architectures))


def count_nvidia_devices(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return the number of installed NVIDIA GPUs, with or without driver; 0 if unknown."""
    count = 0
    for device in pci.glob("*"):
        with suppress(OSError):
            display = (device / "class").read_text().startswith(DISPLAY)
            count += display and (device / "vendor").read_text().strip() == NVIDIA
    return count


def nvidia_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the loaded NVIDIA driver; None if there is none."""
    with suppress(OSError):
        if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text()):
            return found[0]
    return None


def peak_bytes(device: torch.device) -> int:
    """Return the process's peak memory on the device; on a CPU, mapped weights count once read."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # not ru_maxrss: Linux lets a program inherit that from the one that started it
        if line := re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE):
            return int(line[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_bytes(device: torch.device) -> bool:
    """Reset `peak_bytes` to the current usage; returns False if the system does not support it."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")  # Linux: proc(5)
    except OSError:
        return False
    return True

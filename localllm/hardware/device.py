"""What is here: devices, their memory, the dtypes that run well on them. torch is imported inside functions, so
that what needs no device needs no torch."""

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

if TYPE_CHECKING:
    import torch

CONTROL_GROUPS = Path("/sys/fs/cgroup")
CLEAR_REFS = Path("/proc/self/clear_refs")
UNLIMITED_BYTES = 2**60  # bytes; the first version of control groups writes 2**63 less a page for no limit
NVIDIA, DISPLAY = "0x10de", "0x03"  # a maker and a class of PCI devices
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("int8", "fp8")  # of keys and values, beside the model's own
NO_GPU_REMEDY = "leave --device out or name cpu; `localllm doctor` says more"


def resolve_device(name: str) -> torch.device:
    """`auto` takes the first GPU if torch has kernels for it, else the CPU; anything else is taken literally or
    refused, never replaced.

    Raises NoSuchDevice where it is not here, UsageError where the name means nothing.
    """
    import torch

    if name == "cpu":
        return torch.device(name)
    if name != "auto" and not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise UsageError(f"there is no device {name!r}", "name auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count and has_torch_kernels(0) else torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if not count:
        raise NoSuchDevice(
            explain_no_gpu(torch.version.cuda, nvidia_driver(), count_nvidia_devices()), NO_GPU_REMEDY
        )
    if index >= count:
        raise NoSuchDevice(f"there is no device {name}", f"here are cuda:0 to cuda:{count - 1}")
    if not has_torch_kernels(index):
        called = torch.cuda.get_device_name(index)
        raise NoSuchDevice(
            f"this torch has no kernels for {name}, the {called}", f"install one that has; {NO_GPU_REMEDY}"
        )
    return torch.device("cuda", index)


def has_torch_kernels(index: int) -> bool:
    """Has this torch kernels for the GPU?"""
    import torch

    return has_kernels(*torch.cuda.get_device_capability(index), torch.cuda.get_arch_list())


def explain_no_gpu(torch_cuda: str | None, driver: str | None, plugged_in: int) -> str:
    """torch_cuda: the CUDA that torch was made for, None: the CPU alone; driver: its version, None: not loaded."""
    if torch_cuda is None:
        return "there is no CUDA device: this torch is for the CPU alone"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "there is no CUDA device: CUDA_VISIBLE_DEVICES hides all"
    if driver is None:
        here = "an NVIDIA GPU is here" if plugged_in else "no NVIDIA GPU was found"
        return f"there is no CUDA device: {here}, and no driver is loaded"
    return f"there is no CUDA device: torch, made for CUDA {torch_cuda}, cannot use the driver {driver}"


@contextmanager
def device_context(device: torch.device) -> Iterator[None]:
    """What this thread allocates, starts and captures without naming a device goes there."""
    import torch

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def reserve_bytes(device: torch.device, size: int) -> None:
    """Have so many bytes of a GPU kept for this process's later tensors. Raises torch.OutOfMemoryError."""
    import torch

    if device.type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)


def release_cached(device: torch.device) -> None:
    """What torch keeps of a GPU for later tensors goes back to all."""
    import torch

    if device.type == "cuda":
        with suppress(RuntimeError):  # a GPU that broke off releases nothing before the process ends
            torch.cuda.empty_cache()


def resolve_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """As `dtype_for`."""
    import torch

    return getattr(torch, dtype_for(name, stored, device.type))


def dtype_for(name: str, stored: str, device_type: str) -> str:
    """`auto`: as stored, except that a CPU without fast 16-bit arithmetic computes in float32.

    `stored` is the dtype of the weights as safetensors spells it; device_type: `cpu`, which is this machine's, or
    `cuda`.
    Raises UsageError for an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UsageError(f"there is no dtype {name!r}", f"name auto, {', '.join(DTYPES)}")
        return name
    wanted = {"BF16": "bfloat16", "F16": "float16"}.get(stored, "float32")
    if device_type == "cpu" and wanted != "float32":
        import torch

        limited = processor.forced_level() in (
            "avxvnni",
            "avx2",
            "baseline",
        )  # such a processor has no such arithmetic
        if wanted == "float16" or limited or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "float32"
    return wanted


def kv_dtype_for(name: str, dtype: str) -> str:
    """What keys and values are kept in: `auto` is the model's dtype.

    Raises UsageError for an unknown name, and for a dtype that is not the model's.
    """
    if name == "auto":
        return dtype
    if name != dtype and name not in KV_DTYPES:
        if name in DTYPES:
            said = f"keys and values are asked for in {name}, and the model computes in {dtype}"
        else:
            said = f"there is no dtype {name!r} for keys and values"
        raise UsageError(said, f"name auto, {dtype}, {' or '.join(KV_DTYPES)}")
    return name


def dtype_name(dtype: torch.dtype) -> str:
    """As `resolve_dtype` takes it: float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now without pushing anything out."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def total_bytes(device: torch.device) -> int:
    """Memory of the device, whoever uses it now; within what a container grants."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limit, _ = container_memory() or (math.inf, 0)
    return int(min(psutil.virtual_memory().total, limit))


def free_host_bytes() -> int:
    """Of the processor, in bytes, within what a container grants."""
    import psutil

    return int(min(psutil.virtual_memory().available, container_bytes()))


def anonymous_bytes() -> int:
    """Memory of this process that is no copy of a file, so that nobody else may have it. Where the system does not
    tell them apart, mapped files that are read count, too."""
    import psutil

    used = psutil.Process().memory_info()
    return used.rss - getattr(used, "shared", 0)


def container_bytes(groups: Path = CONTROL_GROUPS) -> float:
    """What the memory limit of a Linux container leaves; infinity without one."""
    limit, used = container_memory(groups) or (math.inf, 0)
    return max(0, limit - used)


def container_memory(groups: Path = CONTROL_GROUPS) -> tuple[int, int] | None:
    """Limit and use of a Linux container in bytes; None without a limit. Control groups of both versions.

    Use counts copies of files that nobody reads right now; they make room when it is wanted, so they are left out.
    """
    second = [groups / f"memory.{name}" for name in ("max", "current", "stat")]
    first = [groups / f"memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")]
    for limit, used, parts in (second, first):
        with suppress(OSError, ValueError):  # ValueError: `max`
            in_bytes = int(limit.read_text())
            if in_bytes < UNLIMITED_BYTES:
                return in_bytes, max(0, int(used.read_text()) - _inactive_file_bytes(parts))
    return None


def _inactive_file_bytes(parts: Path) -> int:
    """Of this group and those below it, which the first version counts apart."""
    try:
        found = dict(line.split() for line in parts.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


def usable_cores(groups: Path = CONTROL_GROUPS) -> float:
    """Cores that this process may run on at once: those of its affinity, or what a container grants, maybe 1.5."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = map(int, (groups / "cpu.max").read_text().split())
        return min(cores, quota / period)
    with suppress(OSError, ValueError):
        quota, period = (int((groups / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return min(cores, quota / period) if quota > 0 else cores
    return cores


def device_name(device: torch.device) -> str:
    """The name that a GPU or the processor gives itself."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """Of Arm, which Linux gives no name, the architecture."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """What torch makes use of in this processor, the vectors first, and what LOCALLLM_CPU leaves to the compiled
    kernels, if it is set."""
    import torch

    fast_bfloat16 = ["bfloat16"] if dtype_for("auto", "BF16", "cpu") == "bfloat16" else []
    tiles = ["AMX"] if torch.cpu._is_amx_tile_supported() else []
    level = processor.forced_level()
    limit = [f"LOCALLLM_CPU={level}"] if level else []
    return [torch.backends.cpu.get_cpu_capability(), *fast_bfloat16, *tiles, *limit]


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees."""

    index: int
    name: str
    capability: str  # 9.0
    runs: bool  # does this torch have kernels for it?
    memory_bytes: int
    free_bytes: int


def list_gpus() -> list[Gpu]:
    """Every GPU that torch can use, in its order; none is no error."""
    import torch

    def gpu(index: int) -> Gpu:
        free, memory = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        return Gpu(
            index, torch.cuda.get_device_name(index), f"{major}.{minor}", has_torch_kernels(index), memory, free
        )

    return [gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def has_kernels(major: int, minor: int, architectures: Iterable[str]) -> bool:
    """Does one of them, as `torch.cuda.get_arch_list` names them, run on a GPU of this capability?

    Machine code (`sm_86`) runs on GPUs of its own major version that are not older, PTX (`compute_90`) on all that
    are not older; both with an `a` behind (`sm_90a`) on that very capability alone, with an `f` on those of their
    major version. Source: NVIDIA's manual of nvcc, "GPU Compilation".
    """

    def runs(architecture: str) -> bool:
        named = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if not named:
            return False
        oldest = (int(named[2]), int(named[3]))
        if named[4] == "a":
            return oldest == (major, minor)
        own = named[1] == "sm" or named[4] == "f"
        return oldest <= (major, minor) and (oldest[0] == major or not own)

    return any(map(runs, architectures))


def count_nvidia_devices(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """How many NVIDIA GPUs are plugged in, with a driver or without one; 0 where the system does not say."""
    count = 0
    for device in pci.glob("*"):
        with suppress(OSError):
            display = (device / "class").read_text().startswith(DISPLAY)
            count += display and (device / "vendor").read_text().strip() == NVIDIA
    return count


def nvidia_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver that is loaded, None where there is none."""
    with suppress(OSError):
        if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text()):
            return found[0]
    return None


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held on the device so far; on the CPU mapped weights count once read."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_bytes(device: torch.device) -> bool:
    """Let `peak_bytes` begin anew, at what is held now; False where the system cannot."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")  # Linux: proc(5)
    except OSError:
        return False
    return True

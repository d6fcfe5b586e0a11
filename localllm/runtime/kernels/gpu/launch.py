"""How a Triton kernel is started: on a GPU, under Triton's interpreter on the CPU, or only noted down, so that it
can be compiled for GPUs that are not here.

Under the interpreter (`TRITON_INTERPRET=1` before the first import of triton) kernels take tensors of the CPU. It
is slow, and shows that a kernel computes what its reference does.

On GPUs from sm_90 on a kernel is started while the one before it still runs (programmatic dependent launch, CUDA
C++ Programming Guide, section on it): it may read what no kernel writes, weights, and must call `wait_for_inputs`
before it reads or writes anything else.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.knobs
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
MIN_ARCH = 80  # architectures before it have no bfloat16
PDL_ARCH = 90  # from this architecture on
SMALL_SHARED_ARCHS = (
    86,
    89,
    120,
    121,
)  # architectures with 99 KB of shared memory for a program; others have 163 or more

LaunchGrid = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """What launch choices depend on."""

    arch: int  # 90 is sm_90
    multiprocessors: int


# One of each architecture that kernels are compiled for without having it: A100, RTX 4090, H200, B200, RTX 5090.
GPUS = {arch: Gpu(arch, count) for arch, count in ((80, 108), (89, 128), (90, 132), (100, 148), (120, 170))}


@dataclass(frozen=True)
class RecordedLaunch:
    """One that was noted instead of started."""

    kernel: Any
    grid: LaunchGrid
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


_noted: ContextVar[tuple[Gpu, list[RecordedLaunch]] | None] = ContextVar("noted", default=None)
takes_cpu: bool = (
    INTERPRETED.value
)  # off in tests of other kernels, which run in one process with interpreted ones


def gpu_unsupported(x: Tensor) -> str | None:
    """For `when` of a kernel: None where Triton's kernels take x."""
    if x.device.type == "cpu" and takes_cpu:
        return None
    if x.device.type == "meta" and _noted.get():
        return None
    if x.device.type != "cuda":
        return "needs a GPU"
    arch = gpu_of(x.device).arch
    return None if arch >= MIN_ARCH else f"needs sm_{MIN_ARCH} or newer, not sm_{arch}"


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that a tensor's kernels run on; under the interpreter a small one, so that little work is cut into
    few parts."""
    if noted := _noted.get():
        return noted[0]
    return _gpu(device.index or 0) if device.type == "cuda" else Gpu(MIN_ARCH, 4)


@cache
def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(10 * properties.major + properties.minor, properties.multi_processor_count)


def launch_kernel(
    kernel: Any, grid: LaunchGrid, warps: int, stages: int = 1, *, device: torch.device, **arguments: Any
) -> None:
    """Starts a kernel that has the constexpr parameter PDL on the device of its tensors.

    arguments: by name, all but PDL; stages: loads of loops that are under way at once.
    """
    gpu = gpu_of(device)
    dependent = gpu.arch >= PDL_ARCH and device.type != "cpu"
    arguments |= {"PDL": dependent}
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}  # Triton wants it said
    options |= {"launch_pdl": True} if dependent else {}
    if noted := _noted.get():
        noted[1].append(RecordedLaunch(kernel, grid, arguments, options))
    else:
        kernel[grid](**arguments, **options)


@contextmanager
def record_launches(gpu: Gpu) -> Iterator[list[RecordedLaunch]]:
    """Kernels are not started but noted, as they would be started on this GPU; give them tensors of the device
    `meta`."""
    launches: list[RecordedLaunch] = []
    token = _noted.set((gpu, launches))
    try:
        yield launches
    finally:
        _noted.reset(token)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """What earlier kernels have written can be read from here on, and what they read can be written."""
    if PDL:
        gdc_wait()


@triton.jit
def allow_next_kernel(PDL: tl.constexpr):
    """The next kernel may start; it waits for all that this one still writes."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32. The interpreter would multiply the bit patterns of bfloat16, so it gets float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")

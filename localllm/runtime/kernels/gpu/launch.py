"""Launches Triton kernels on a GPU or under Triton's interpreter on the CPU, or hands the launch to a function.

Under the interpreter (`TRITON_INTERPRET=1` before the first import of triton), kernels take tensors on the CPU. It
is slow, and is used to compare a kernel with its reference. Recorded launches can be compiled for GPUs that are
not here, and a program can execute them in a GPU's stead.

On GPUs from sm_90 on, a kernel is started while the previous one still runs (programmatic dependent launch, see
the CUDA C++ Programming Guide): before it calls `wait_for_inputs` it may only read what no kernel writes, such as
weights, and what the previous one does not write, for prefetches. The kernels before that have ended, because each
calls `wait_for_inputs` before `allow_next_kernel`.
"""

from collections.abc import Callable, Iterator, Mapping
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

from localllm.hardware.catalog import MIN_GPU_ARCH
from localllm.hardware.device import arch_name, device_context, required_arch
from localllm.quant.packing import chunk_words, gpu_packed_columns
from localllm.quant.tensor import QuantizedTensor
from localllm.settings import Settings

# Formats of the examples' weights.
BITS = {"int4": 4, "q4_k": 4, "mxfp4": 4, "int8": 8, "q6_k": 8, "fp8": 8}
FORMATS = {4: "int4_planes", 8: "int8_planes"}
K_BLOCK = 256  # columns
ROWS = 16
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Assembly of NVIDIA's GPUs. AMD's, and the interpreter, compute the same values without.
PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
PDL_ARCH = 90  # first architecture with programmatic dependent launch
# Architectures with 99 KB of shared memory per program; others of NVIDIA have 163 KB or more.
SMALL_SHARED_ARCHS = (86, 89, 120, 121)
LaunchGrid = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that launch parameters depend on."""

    arch: int  # 90 is sm_90; 0 is one of AMD
    multiprocessors: int
    amd_arch: str = ""  # such as gfx942

    @property
    def small_shared(self) -> bool:
        """Whether a program has less than 100 KB of shared memory."""
        return bool(self.amd_arch) or self.arch in SMALL_SHARED_ARCHS


# One GPU of each architecture that kernels are compiled for: A100, RTX 4090, H200, B200, RTX 5090.
GPUS = {arch: Gpu(arch, count) for arch, count in ((80, 108), (89, 128), (90, 132), (100, 148), (120, 170))}
# MI300X, RX 7900 XTX, RX 9070 XT: 64 KB of shared memory.
AMD_GPUS = {arch: Gpu(0, count, arch) for arch, count in (("gfx942", 304), ("gfx1100", 96), ("gfx1201", 64))}


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch that was handed to a function instead of a GPU."""

    kernel: Any
    grid: LaunchGrid
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


_redirection: ContextVar[tuple[Gpu, Callable[[RecordedLaunch], object]] | None]
_redirection = ContextVar("redirection", default=None)
_without_pdl: ContextVar[bool] = ContextVar("without_pdl", default=False)
takes_cpu: bool = INTERPRETED.value  # disabled in tests of other kernels in a process with interpreted ones


def gpu_unsupported(x: Tensor) -> str | None:
    """Return why Triton's kernels do not support x, or None if they do."""
    if x.device.type == "cpu" and takes_cpu:
        return None
    if x.device.type in ("meta", "cpu") and _redirection.get():
        return None
    if x.device.type != "cuda":
        return "needs a GPU"
    gpu = gpu_of(x.device)
    arch = gpu.amd_arch or f"sm_{gpu.arch}"
    required = required_arch(arch)
    return required and f"needs {required}, not {arch}"


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU that a tensor's kernels run on; under the interpreter a small one, so that work is split
    little.
    """
    if redirection := _redirection.get():
        return redirection[0]
    return _gpu(device.index or 0) if device.type == "cuda" else Gpu(MIN_GPU_ARCH, 4)


@cache
def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    name = arch_name(index)
    amd_arch = name if name.startswith("gfx") else ""
    arch = 0 if amd_arch else int(name.removeprefix("sm_"))
    return Gpu(arch, properties.multi_processor_count, amd_arch)


def launch_kernel(
    kernel: Any,
    grid: LaunchGrid,
    warps: int,
    stages: int = 1,
    *,
    device: torch.device,
    contract: bool = True,
    most_registers: int | None = None,
    **arguments: Any,
) -> None:
    """Launch a kernel with the constexpr parameter PDL on the device of its tensors.

    arguments: by name, all except PDL; stages: loads of a loop that are in flight at once; contract: compute
    a * b + c with one rounding. A kernel whose threads add up products of each other must not: of a * b + c * d,
    two threads with copies of the sum would each round another product, and which copy is used would depend on the
    order of warps; most_registers: per thread, where NVIDIA's compiler would otherwise spill rather than use them.
    """
    pdl = uses_pdl(device)
    arguments |= {"PDL": pdl}
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": contract}
    options |= {"launch_pdl": True} if pdl else {}
    if most_registers and gpu_of(device).arch:  # AMD's compiler has no such option
        options |= {"maxnreg": most_registers}
    if redirection := _redirection.get():
        redirection[1](RecordedLaunch(kernel, grid, arguments, options))
    elif device.type != "cuda" or (device.index or 0) == torch.cuda.current_device():
        kernel[grid](**arguments, **options)
    else:  # Triton launches on the current device, wherever the tensors are
        with device_context(device):
            kernel[grid](**arguments, **options)


def uses_pdl(device: torch.device) -> bool:
    """Return whether kernels on the device start before the previous ones have ended."""
    supported = gpu_of(device).arch >= PDL_ARCH  # not under the interpreter
    return supported and not _without_pdl.get() and pdl_setting()


@cache
def pdl_setting() -> bool:
    """Return LOCALLLM_PDL."""
    return Settings.from_environment().pdl


@contextmanager
def without_pdl() -> Iterator[None]:
    """Launch and capture kernels without programmatic dependent launch."""
    token = _without_pdl.set(True)
    try:
        yield
    finally:
        _without_pdl.reset(token)


@contextmanager
def redirect_launches(gpu: Gpu, launch: Callable[[RecordedLaunch], object]) -> Iterator[None]:
    """Call `launch` with kernels as they would be launched on this GPU. Their tensors may be on the CPU."""
    token = _redirection.set((gpu, launch))
    try:
        yield
    finally:
        _redirection.reset(token)


@contextmanager
def record_launches(gpu: Gpu) -> Iterator[list[RecordedLaunch]]:
    """Record kernels as they would be launched on this GPU, without running them. Use tensors on device `meta`."""
    launches: list[RecordedLaunch] = []
    with redirect_launches(gpu, launches.append):
        yield launches


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until results of earlier kernels can be read, and their inputs overwritten."""
    if PDL:
        gdc_wait()


@triton.jit
def allow_next_kernel(PDL: tl.constexpr):
    """Let the next kernel start; its `wait_for_inputs` waits for everything that this one still writes.

    Programs that wait occupy multiprocessors, and what they prefetch shares this kernel's bandwidth: one that
    reads for more than a few microseconds allows it at its end.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32.

    The interpreter would multiply bit patterns of bfloat16, so inputs are converted first.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def meta_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without memory, for compiling kernels for GPUs that are not here."""
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_packed_weight(kind: str, rows: int, columns: int, group: int | None) -> QuantizedTensor:
    """Return a weight in the packed GPU layout of INT4, INT8, a K-quant or a float format."""
    bits = BITS[kind]
    words = chunk_words(group, columns, bits)
    assert words
    padded_columns, padded_rows = gpu_packed_columns(words, columns, bits), -(-rows // ROWS) * ROWS
    chunks, groups = padded_columns * bits // 16 // words, -(-padded_columns // (group or padded_columns))
    q = meta_tensor(padded_rows // ROWS, chunks, ROWS, words, dtype=torch.int16)
    gpu_format = {"mxfp4": "mxfp4_planes", "fp8": "fp8_planes"}.get(kind, FORMATS[bits])
    parts = {"q": q}
    if kind in ("q4_k", "q6_k"):
        parts |= {"scale": meta_tensor(groups, padded_rows, dtype=torch.int8)}
        parts |= {"block_scale": meta_tensor(padded_columns // K_BLOCK, padded_rows, dtype=torch.float16)}
        if kind == "q4_k":
            parts |= {"minimum": parts["scale"], "block_minimum": parts["block_scale"]}
    else:
        scales = {"mxfp4": torch.uint8, "fp8": torch.float32}
        parts["scale"] = meta_tensor(groups, padded_rows, dtype=scales.get(kind, torch.bfloat16))
    return QuantizedTensor(gpu_format, (rows, columns), parts, group)

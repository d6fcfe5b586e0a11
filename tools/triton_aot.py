"""Compiles recorded launches for an architecture without a GPU, and reports the resources they use."""

import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from localllm.runtime.kernels.gpu.launch import PDL_ARCH, Gpu, RecordedLaunch

WARP_THREADS = 32  # in a warp
# Shared memory available to a block: CUDA C++ Programming Guide, table of technical specifications.
SHARED_BYTES = {80: 163 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10, 120: 99 * 2**10}
LOCAL_DATA_SHARE_BYTES = 64 * 2**10  # AMD's shared memory of a block
TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}
# Instructions that write, exit, or let the next kernel start.
FORBIDDEN_BEFORE_WAIT = {"st.global", "atom.global", "red.global", "ret", "griddepcontrol"}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class CompiledTriton:
    name: str
    arch: int
    warps: int
    stages: int
    registers: int  # per thread
    spilled_bytes: int  # per thread
    shared_bytes: int  # per block
    ptx: str
    cubin: bytes

    @property
    def spills(self) -> bool:
        return self.spilled_bytes > 0

    @property
    def fits(self) -> bool:
        return not self.spills and self.shared_bytes <= SHARED_BYTES[self.arch]

    @property
    def premature_instructions(self) -> set[str]:
        """Forbidden instructions that the kernel may execute before it has waited for the previous kernel."""
        return instructions_before_wait(self.ptx) & FORBIDDEN_BEFORE_WAIT if self.arch >= PDL_ARCH else set()

    @property
    def fault(self) -> str | None:
        """What does not fit the architecture, or happens before the kernel has waited for the previous one."""
        premature = self.premature_instructions
        if self.fits and not premature:
            return None
        used = f"{self.spilled_bytes} bytes spilled, {self.shared_bytes} of shared memory"
        return f"sm_{self.arch}: {used}, before it waits: {', '.join(sorted(premature)) or 'nothing'}"


@dataclass(frozen=True)
class CompiledForAmd:
    name: str
    arch: str  # such as gfx942
    warps: int
    registers: int  # vector registers per thread
    spilled_registers: int
    shared_bytes: int  # per block, of LOCAL_DATA_SHARE_BYTES

    @property
    def spills(self) -> bool:
        return self.spilled_registers > 0

    @property
    def fault(self) -> str | None:
        """What does not fit the architecture. Spilled registers cost speed, and are listed only."""
        fits = self.shared_bytes <= LOCAL_DATA_SHARE_BYTES
        return None if fits else f"{self.arch}: {self.shared_bytes} bytes of shared memory"


def compile_for(launch: RecordedLaunch, arch: int) -> CompiledTriton:
    """Compile a launch for NVIDIA's architecture `arch`, 90 for sm_90."""
    target = GPUTarget("cuda", arch, WARP_THREADS)
    compiled = triton.compile(specialize(launch), target=target, options=dict(launch.options))
    registers, spilled = kernel_resources(compiled.asm["cubin"])
    return CompiledTriton(
        launch.kernel.__name__,
        arch,
        launch.options["num_warps"],
        launch.options["num_stages"],
        registers,
        spilled,
        compiled.metadata.shared,
        compiled.asm["ptx"],
        compiled.asm["cubin"],
    )


def compile_for_amd(launch: RecordedLaunch, arch: str) -> CompiledForAmd:
    """Compile a launch for AMD's architecture `arch`; `torch.version.hip` was set when kernels were imported."""
    target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    compiled = triton.compile(specialize(launch), target=target, options=dict(launch.options))
    assembly = compiled.asm["amdgcn"]
    registers, spilled = (int(re.findall(rf"\.vgpr_{of}: +(\d+)", assembly)[0]) for of in ("count", "spill_count"))
    name, warps = launch.kernel.__name__, launch.options["num_warps"]
    return CompiledForAmd(name, arch, warps, registers, spilled, compiled.metadata.shared)


def specialize(launch: RecordedLaunch) -> ASTSource:
    """Return what Triton's own launcher would compile."""
    return ASTSource(launch.kernel, *specialization(launch))


Specialization = tuple[
    dict[str, str], dict[tuple[int, ...], object], dict[tuple[int, ...], list[list[object]]]
]  # types by name, constants and attributes by index


def specialization(launch: RecordedLaunch) -> Specialization:
    """Return types, constants and attributes: integers that are 1 or divisible by 16, and pointers to multiples of
    16 bytes, are special. Tensors on device `meta` count as aligned.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = triton_type(value)
        address = value.data_ptr() if isinstance(value, Tensor) else value
        if type(address) is int and address % 16 == 0 and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compilation_key(launch: RecordedLaunch) -> str:
    """Return a text that is the same for launches that share machine code."""
    return repr((launch.kernel.__name__, specialization(launch), sorted(launch.options.items())))


@dataclass(frozen=True)
class AbsentGpu:
    """Stands in for Triton's driver, as far as compilation needs one."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(launches: Iterable[RecordedLaunch], gpu: Gpu, processes: int) -> None:
    """Compile into Triton's cache, in forked processes, which inherit the launches and use no GPU."""
    launches = list(launches)
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=compile_some, args=(launches[i::processes], gpu))
        for i in range(min(processes, len(launches)))
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a kernel could not be compiled; its error is on stderr")


def compile_some(launches: list[RecordedLaunch], gpu: Gpu) -> None:
    absent: Any = AbsentGpu(GPUTarget("cuda", gpu.arch, WARP_THREADS))  # no driver by its class
    triton.runtime.driver.set_active(absent)
    for launch in launches:
        launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)


def instructions_before_wait(ptx: str) -> set[str]:
    """Return the instructions that a program can reach on any branch before it waits."""
    name, blocks, order = "", {"": list[str]()}, [""]
    for line in ptx[ptx.index(".entry") :].splitlines():
        if label := re.match(r"(\$\w+):", line):
            name = label[1]
            blocks[name] = []
            order.append(name)
        else:
            blocks[name].append(line.strip())
    next_block = dict(pairwise(order))
    instructions: set[str] = set()
    queue, seen = [""], {""}
    while queue:
        name = queue.pop()
        targets, falls_through = set[str](), True
        for line in blocks[name]:
            if line.startswith("griddepcontrol.wait"):
                falls_through = False
            elif instruction := re.match(r"(@\S+\s+)?([a-z]+(\.global)?)", line):
                instructions.add(instruction[2])
                if instruction[2] == "bra":
                    targets.add(line.rstrip(";").split()[-1])
                falls_through = instruction[2] not in ("bra", "ret") or bool(instruction[1])
            if not falls_through:
                break
        if falls_through and name in next_block:
            targets.add(next_block[name])
        queue += targets - seen
        seen |= targets
    return instructions


def triton_type(value: object) -> str:
    match value:
        case Tensor():
            return "*" + TRITON_TYPES[str(value.dtype).removeprefix("torch.")]
        case bool():
            return "i1"
        case int():
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        case float():
            return "fp32"
    raise TypeError(f"unsupported kernel argument: {type(value).__name__}")


def kernel_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and spilled bytes per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert match, usage
    return int(match[1]), int(match[2]) + int(match[3])

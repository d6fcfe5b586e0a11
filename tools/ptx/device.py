"""A GPU made of software: runs launches of Triton kernels on tensors of the CPU, by executing their PTX.

    with SoftwareGpu(seed=7):
        y = rms_norm(x, weight, 1e-5)  # launches norm_kernel

Kernels are compiled for sm_80, whose tensor cores are programmed with mma.sync. With `pdl`, they are launched as
on sm_90, and compiled for it unless they use its own tensor core instructions. Each may then start before the
previous one has ended, and the machine checks what it touches before it waits.

A tensor of torch.empty counts as uninitialized until something writes to it.
"""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.knobs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from localllm.runtime.kernels.gpu.launch import Gpu, RecordedLaunch, redirect_launches
from tools.ptx.machine import Code, Grid
from tools.ptx.memory import Clocks, GlobalMemory, PrematureError, Region
from tools.ptx.parser import Program, parse
from tools.ptx.rounding import Array
from tools.ptx.steps import decode
from tools.triton_aot import WARP_THREADS, specialize

ARCH, PDL_ARCH = 80, 90
ARCHITECTURE_SPECIFIC = {"wgmma", "fence", "mbarrier"}  # not defined here
MULTIPROCESSORS = 4  # few, so that work is split little


@dataclass(frozen=True)
class Executable:
    ptx: str
    parameters: tuple[str, ...]  # names of the kernel's arguments that are passed at run time
    shared_bytes: int

    @cached_property
    def program(self) -> Program:
        return parse(self.ptx)

    @cached_property
    def code(self) -> Code:
        return decode(self.program)


@dataclass
class Ran:
    """What a launch did, for statistics and tests."""

    kernel: str
    opcodes: frozenset[str]
    blocks: int
    threads: int  # per block
    shapes: list[str]  # of the tensors


_executables: dict[str, Executable] = {}


def compile_ptx(launch: RecordedLaunch) -> Executable:
    """Compile a launch as Triton's launcher would, but not further than to PTX.

    With PDL it is compiled for sm_90, unless it then uses instructions of that architecture's tensor cores.
    """
    if launch.options.get("launch_pdl"):
        executable = compile_ptx_for(launch, PDL_ARCH)
        if not any(i.name in ARCHITECTURE_SPECIFIC for i in executable.program.instructions):
            return executable
    return compile_ptx_for(launch, ARCH)


def compile_ptx_for(launch: RecordedLaunch, arch: int) -> Executable:
    source = specialize(launch)
    key = f"{arch} {source.hash()} {sorted(launch.options.items())}"
    if key not in _executables:
        knobs: Any = triton.knobs
        options = {name: value for name, value in launch.options.items() if name != "launch_pdl"}
        with knobs.runtime.scope(), knobs.cache.scope():
            knobs.runtime.add_stages_inspection_hook = _without_assembler
            # Apart, as Triton 3.6 would return machine code of no bytes to whoever compiles the kernel next.
            knobs.cache.dir = str(Path(knobs.cache.dir) / "ptx")
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP_THREADS), options=options)
        names = tuple(name for name, kind in source.signature.items() if kind != "constexpr")
        ptx = compiled.asm["ptx"]
        _executables[key] = Executable(ptx, names, compiled.metadata.shared)
    return _executables[key]


def _without_assembler(*arguments: Any) -> tuple[str, str] | None:
    """Let the last stage of a compilation return nothing: ptxas is not needed. Without arguments, return a cache
    key, as Triton since 3.7 asks for.
    """
    if not arguments:
        return "ptx", "ptx"
    arguments[1]["cubin"] = lambda ptx, metadata: b""
    return None


class Initialization(TorchDispatchMode):
    """Notes which bytes of tensors that torch.empty made have been written."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, Array]] = {}  # by address: which bytes hold a value

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if "empty" in function.name() and isinstance(result, Tensor) and result.device.type == "cpu":
            storage = result.untyped_storage()
            storage_bytes(result)[:] = 0xFF
            self.storages[storage.data_ptr()] = StorageWeakRef(storage), np.zeros(storage.nbytes(), bool)
        elif function._schema.is_mutable:
            given = (
                dict(zip((each.name for each in function._schema.arguments), arguments, strict=False)) | options
            )
            for each in function._schema.arguments:
                if each.alias_info and each.alias_info.is_write:
                    self.note_written(given.get(each.name))
        return result

    def note_written(self, value: object) -> None:
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor) and (flags := self.of(tensor)) is not None:
                flags |= bytes_of(tensor)

    def of(self, tensor: Tensor) -> Array | None:
        """Return which bytes of the tensor's storage hold a value; None: all."""
        address = tensor.untyped_storage().data_ptr()
        reference, flags = self.storages.get(address, (None, None))
        if reference is not None and reference.expired():
            del self.storages[address]
            return None
        return flags


def storage_bytes(tensor: Tensor) -> Array:
    """Return the memory of a tensor's storage."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))


def bytes_of(tensor: Tensor) -> Array:
    """Return which bytes of its storage belong to a tensor."""
    size, count = tensor.element_size(), tensor.untyped_storage().nbytes()
    elements = np.zeros(count // size + 1, bool)
    strides = [stride * elements.itemsize for stride in tensor.stride()]
    if tensor.numel():
        np.lib.stride_tricks.as_strided(elements[tensor.storage_offset() :], tensor.shape, strides)[...] = True
    return np.repeat(elements, size)[:count]


class SoftwareGpu(AbstractContextManager["SoftwareGpu"]):
    """Executes launches while it is entered. seed: of the order of threads and blocks"""

    def __init__(self, seed: int = 0, *, pdl: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        self.gpu = Gpu(PDL_ARCH if pdl else ARCH, MULTIPROCESSORS)
        self.initialization = Initialization()
        self.launches: list[Ran] = []
        self.edit: Callable[[RecordedLaunch, Executable], Executable] = lambda launch, executable: executable
        # Bytes that kernels have written which may still run when the next one starts, by address of a storage.
        # With the tensors, whose addresses no other tensor may be given before.
        self.unfinished: dict[int, tuple[Tensor, Array]] = {}
        self.stack = ExitStack()

    def __enter__(self) -> "SoftwareGpu":
        self.stack.enter_context(redirect_launches(self.gpu, self.launch))
        self.stack.enter_context(self.initialization)
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def launch(self, launch: RecordedLaunch) -> None:
        executable = self.edit(launch, compile_ptx(launch))
        arguments = {name: launch.arguments[name] for name in executable.parameters}
        self.execute(executable, launch.grid, arguments, early=bool(launch.options.get("launch_pdl")))

    def execute(
        self,
        executable: Executable,
        blocks: tuple[int, ...],
        arguments: Mapping[str, Tensor | float],
        *,
        early: bool = False,
    ) -> None:
        """Run a kernel. early: it may have started before the previous one ended."""
        program = executable.code.program
        parameters = dict(zip(arguments, program.parameters, strict=False))
        written = {name for name, parameter in parameters.items() if parameter in program.written_parameters}
        storages: dict[int, dict[str, Tensor]] = {}  # tensors that share memory
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                storages.setdefault(value.untyped_storage().data_ptr(), {})[name] = value
        regions = [self.region(tensors, written) for tensors in storages.values()]
        width, height, depth = (*blocks, 1, 1)[:3]
        clocks = Clocks(program.threads, width * height * depth)
        memory = GlobalMemory(regions, executable.code.global_unit, clocks)
        values = dict.fromkeys(program.parameters, 0)  # the last ones are Triton's own and unused
        for name, parameter in parameters.items():
            match arguments[name]:
                case Tensor() as tensor:
                    number = list(storages).index(tensor.untyped_storage().data_ptr())
                    values[parameter] = memory.address(
                        number, int(tensor.storage_offset()) * tensor.element_size()
                    )
                case float(number):
                    values[parameter] = int(np.float32(number).view(np.uint32))
                case number:
                    values[parameter] = int(number)
        grid = Grid(
            executable.code,
            (width, height, depth),
            values,
            executable.shared_bytes,
            memory,
            clocks,
            self.random,
            early,
        )
        with np.errstate(all="ignore"):  # NaN and infinities are results like others
            grid.run()
        self.check_early_reads(grid, list(storages))
        self.finish(grid, [next(iter(tensors.values())) for tensors in storages.values()])
        opcodes = frozenset(instruction.opcode for instruction in program.instructions)
        shapes = [
            f"{name.removeprefix('p_')} {' x '.join(map(str, each.shape))}"
            for name, each in arguments.items()
            if isinstance(each, Tensor)
        ]
        self.launches.append(Ran(program.name, opcodes, grid.blocks, program.threads, shapes))

    def region(self, tensors: Mapping[str, Tensor], written: set[str]) -> Region:
        """Return the memory that tensors share."""
        tensor = next(iter(tensors.values()))
        content = storage_bytes(tensor)
        allowed = np.logical_or.reduce([bytes_of(each) for each in tensors.values()])
        flags = self.initialization.of(tensor)
        if flags is not None:  # kernels for the CPU write unnoticed, but hardly ever only ones
            size = tensor.element_size()
            changed = (content[: len(content) // size * size].reshape(-1, size) != 0xFF).any(1)
            flags[: len(changed) * size] |= np.repeat(changed, size)
        initialized = np.ones(len(content), bool) if flags is None else flags
        lead = tensor.untyped_storage().data_ptr() % 256
        return Region(" and ".join(tensors), content, lead, allowed, initialized, bool(written & tensors.keys()))

    def check_early_reads(self, grid: Grid, storages: list[int]) -> None:
        """Compare what the kernel read before it waited with what the one before it has written."""
        for number, (at, address) in enumerate(zip(grid.memory.slices(), storages, strict=True)):
            if address not in self.unfinished:
                continue
            written = self.unfinished[address][1]
            for index, size in grid.early_reads:
                inside = index[(index >= at.start) & (index < at.stop)] - at.start
                if written[inside[:, None] + np.arange(size)].any():
                    name = grid.memory.regions[number].name
                    raise PrematureError(
                        f"{grid.program.name} reads {name} before it waits for the kernel that writes it"
                    )

    def finish(self, grid: Grid, tensors: list[Tensor]) -> None:
        """Copy what was written back to the tensors, and remember it for the next launch."""
        if not grid.early_triggers:
            self.unfinished = {}
        memory = grid.memory
        stored = np.repeat(memory.write_time >= -1, memory.unit) & np.repeat(memory.writer >= 0, memory.unit)
        for number, (at, tensor) in enumerate(zip(memory.slices(), tensors, strict=True)):
            if not memory.regions[number].tracked:
                continue
            content, written = memory.written_back(number)
            storage_bytes(tensor)[stored[at]] = content[stored[at]]
            flags = self.initialization.of(tensor)
            if flags is not None:
                flags[:] = written
            address = tensor.untyped_storage().data_ptr()
            _, before = self.unfinished.get(address, (tensor, False))
            self.unfinished[address] = tensor, before | stored[at]

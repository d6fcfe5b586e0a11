"""Compilation of IR programs to machine code, and their execution in as many threads as torch uses.

The parts of a kernel run on torch's own OpenMP threads: a second thread pool would compete with them for the
cores. Machine code is cached on disk under the properties of a kernel and a digest of the code that emits it, so
that a cached kernel is neither emitted nor parsed again.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVarTuple

import llvmlite
import llvmlite.binding as llvm
import torch

import localllm
from localllm.hardware import processor
from localllm.quant import packing
from localllm.quant.formats import groups
from localllm.runtime.kernels.cpu.ir import Program
from localllm.runtime.kernels.threads import openmp, run_in_parts
from localllm.settings import Settings

P = TypeVarTuple("P")
SHIPPED_KERNELS = PurePosixPath("boxed/kernels")  # below the package; only the single-file binary has it
DIGEST_BYTES = 32  # SHA-256, in front of the machine code in a cache file
# Entry point of an OpenMP thread. It reads the number of threads, which may be lower than requested.
OPENMP_ENTRY = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()

define void @{name}_thread(ptr %arguments) {{
  %number = call i32 @omp_get_thread_num()
  %count = call i32 @omp_get_num_threads()
  %part = zext i32 %number to i64
  %parts = zext i32 %count to i64
  call void @{name}(ptr %arguments, i64 %part, i64 %parts)
  ret void
}}
"""


@dataclass(frozen=True)
class KernelSource:
    """A program before it is compiled."""

    emit: Callable[[Program], None]  # builds its body
    name: str
    argument_count: int


class CompiledKernel:
    """A compiled program, called with its arguments: addresses and counts as integers.

    A kernel checks nothing: the caller validates shapes, dtypes, devices and strides first.
    """

    def __init__(self, source: KernelSource, code: bytes):
        """code: object file of the source."""
        self.engine = load_code(code)
        self.argument_array: type[ctypes.Array[ctypes.c_int64]] = ctypes.c_int64 * source.argument_count
        signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.run_part = signature(self.engine.get_function_address(source.name))
        thread_entry = linked_openmp() and self.engine.get_function_address(f"{source.name}_thread")
        self.run_thread = thread_entry and ctypes.c_void_p(thread_entry)

    def __call__(self, *arguments: int) -> None:
        """Run the kernel in as many threads as torch uses."""
        parts = torch.get_num_threads()
        slots = self.argument_array(*arguments)
        if parts == 1:
            self.run_part(slots, 0, 1)
        elif self.run_thread:
            openmp().GOMP_parallel(self.run_thread, slots, parts, 0)
        else:
            run_in_parts(lambda part, parts: self.run_part(slots, part, parts))

    def run_single(self, *arguments: int) -> None:
        """Run the kernel in the calling thread alone."""
        self.run_part(self.argument_array(*arguments), 0, 1)


class SkippedKernel:
    """A kernel that computes nothing, in place of those called within `compile_only`."""

    def __call__(self, *arguments: int) -> None:
        pass

    run_single = __call__


SKIPPED = SkippedKernel()
# Kernels that the calls of this thread wait for; None: calls run their kernels.
COMPILE_ONLY: ContextVar[list[Future[CompiledKernel]] | None] = ContextVar("compile_only", default=None)


class CompileOnce(Generic[*P]):
    """Decorator: cache one kernel per set of properties, compiled at its first use while other threads wait."""

    def __init__(self, make_source: Callable[[*P], KernelSource]):
        self.make_source = make_source
        self.compiled_kernels: dict[tuple[*P], CompiledKernel] = {}
        self.pending: dict[tuple[*P], Future[CompiledKernel]] = {}
        self.lock = threading.Lock()

    def __call__(self, *properties: *P) -> CompiledKernel | SkippedKernel:
        """Return the kernel, compiled if necessary; within `compile_only`, one that computes nothing."""
        waiting = COMPILE_ONLY.get()
        if waiting is not None:
            waiting.append(self.compile_ahead(*properties))
            return SKIPPED
        if properties in self.compiled_kernels:
            return self.compiled_kernels[properties]
        return self.compile_ahead(*properties).result()

    def compile_ahead(self, *properties: *P) -> Future[CompiledKernel]:
        """Compile the kernel in a background thread."""
        with self.lock:
            if properties in self.compiled_kernels:
                future = Future[CompiledKernel]()
                future.set_result(self.compiled_kernels[properties])
                return future
            if properties not in self.pending:
                self.pending[properties] = compile_pool().submit(self.compile, properties)
            return self.pending[properties]

    def compile(self, properties: tuple[*P]) -> CompiledKernel:
        try:
            source = self.make_source(*properties)
            kernel = CompiledKernel(source, machine_code(source, properties))
            self.compiled_kernels[properties] = kernel
        finally:
            with self.lock:
                self.pending.pop(properties, None)
        return kernel


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Let the kernels that this thread calls in the block be compiled, and compute nothing.

    Waits at its end until all of them are compiled. Their results are whatever memory held before.
    """
    waiting: list[Future[CompiledKernel]] = []
    token = COMPILE_ONLY.set(waiting)
    try:
        yield
    finally:
        COMPILE_ONLY.reset(token)
    for future in waiting:
        future.result()


def float_bits(number: float) -> int:
    """A float32 as an argument of a kernel: its bits in the lower half of an int64."""
    return struct.unpack("<q", struct.pack("<fi", number, 0))[0]


@functools.cache
def compile_pool() -> ThreadPoolExecutor:
    """The thread that compiles; llvmlite's lock would let others wait."""
    return ThreadPoolExecutor(1, "localllm-compile")


@functools.cache
def linked_openmp() -> Any:
    """Return the OpenMP runtime, whose functions compiled code may call from now on; None if there is none."""
    library = openmp()
    for name in ("omp_get_thread_num", "omp_get_num_threads") if library else ():
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return library


@functools.cache
def llvm_target() -> llvm.Target:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def cpu_supported() -> bool:
    """Return whether kernels can be compiled for this processor."""
    return processor.kernels_supported()


def machine_code(source: KernelSource, properties: tuple[object, ...]) -> bytes:
    """Return the object file of a kernel, from the cache on disk if it is there.

    properties: all that the source was made from; with its name, they identify it.
    """
    target = processor.kernel_target()
    key = (
        *(source.name, repr(properties), *target, str(bool(openmp())), emitters_digest()),
        *(llvmlite.__version__, *map(str, llvm.llvm_version_info)),
    )
    code = read_cached(key)
    if code is None:
        code = compile_llvm(emit_llvm(source, target.byte_product))
        write_cached(key, code)
    return code


def emit_llvm(source: KernelSource, byte_product: str) -> str:
    """Emit a kernel, and its entry point for OpenMP threads, as LLVM IR."""
    program = Program(source.name, byte_product)
    collects = gc.isenabled()
    gc.disable()  # the many objects of a program would cause full collections, 0.15 s each where torch is loaded
    try:
        source.emit(program)
        text = program.to_llvm()
    finally:
        if collects:
            gc.enable()
    return text + OPENMP_ENTRY.format(name=source.name) if openmp() else text


@functools.cache
def emitters_digest() -> str:
    """Digest of the modules whose code and constants decide what a kernel's IR is."""
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), *(Path(module.__file__ or "") for module in (groups, packing))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def target_machine() -> llvm.TargetMachine:
    target = processor.kernel_target()
    return llvm_target().create_target_machine(cpu=target.cpu, features=target.flags, opt=3)


def compile_llvm(text: str) -> bytes:
    """Compile and optimize LLVM IR for the processor at hand -> an object file."""
    machine = target_machine()
    module = llvm.parse_assembly(text)
    module.verify()
    optimize(module, machine)
    return machine.emit_object(module)


def optimize(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Run the passes that kernels need; the emitted code is unrolled, vectorized and inlined already.

    They take half the time of LLVM's level 3, and leave no more instructions in the inner loops.
    """
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_loop_rotate_pass()
    passes.add_new_gvn_pass()
    passes.add_reassociate_pass()  # integer sums only: NEON then multiplies and adds in one instruction
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)


def load_code(code: bytes) -> llvm.ExecutionEngine:
    """Load an object file into this process."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def file_name(key: tuple[str, ...]) -> str:
    """Return the name of the file of a kernel's machine code."""
    return hashlib.sha256("\0".join(key).encode()).hexdigest() + ".o"


def cache_path(key: tuple[str, ...]) -> Path:
    """Path of a kernel's machine code below the cache folder."""
    return Settings.from_environment().cache / "kernels" / file_name(key)


def shipped_path(key: tuple[str, ...]) -> Path:
    """Path of a kernel's machine code in the package, which most kernels do not have there."""
    return Path(localllm.__file__).parent / SHIPPED_KERNELS / file_name(key)


def read_cached(key: tuple[str, ...]) -> bytes | None:
    """Return cached or shipped machine code, or None if no file has it or the file is not what was written."""
    for path in (cache_path(key), shipped_path(key)):
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return code
    return None


def write_cached(key: tuple[str, ...], code: bytes) -> None:
    """Write digest and machine code atomically; a cache that cannot be written is skipped."""
    path = cache_path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)

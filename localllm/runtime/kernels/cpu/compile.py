"""Compilation of IR programs to machine code, and their execution in as many threads as torch uses.

The parts of a kernel run on torch's own OpenMP threads: a second thread pool would compete with them for the
cores.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import struct
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVarTuple

import llvmlite
import llvmlite.binding as llvm
import torch

from localllm.hardware import processor
from localllm.hardware.processor import features
from localllm.runtime.kernels.cpu.ir import Program
from localllm.runtime.kernels.threads import run_in_parts
from localllm.settings import Settings

P = TypeVarTuple("P")
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


class CompiledKernel:
    """A compiled program, called with its arguments: addresses and counts as integers.

    A kernel checks nothing: the caller validates shapes, dtypes, devices and strides first.
    """

    def __init__(self, emit: Callable[[Program], None], name: str, argument_count: int):
        """emit: builds the body of the program."""
        program = Program(name, processor.byte_product(features()))
        emit(program)
        text = program.to_llvm()
        self.engine = compile_llvm(text + OPENMP_ENTRY.format(name=name) if openmp() else text)
        self.argument_array: type[ctypes.Array[ctypes.c_int64]] = ctypes.c_int64 * argument_count
        signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.run_part = signature(self.engine.get_function_address(name))
        self.run_thread = openmp() and ctypes.c_void_p(self.engine.get_function_address(f"{name}_thread"))

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


class CompileOnce(Generic[*P]):
    """Decorator: cache one kernel per set of properties, compiled at its first use while other threads wait."""

    def __init__(self, compile_kernel: Callable[[*P], CompiledKernel]):
        self.compile = compile_kernel
        self.compiled_kernels: dict[tuple[*P], CompiledKernel] = {}
        self.lock = threading.Lock()

    def __call__(self, *properties: *P) -> CompiledKernel:
        if properties not in self.compiled_kernels:
            with self.lock:
                if properties not in self.compiled_kernels:
                    self.compiled_kernels[properties] = self.compile(*properties)
        return self.compiled_kernels[properties]

    def compile_ahead(self, *properties: *P) -> Future[CompiledKernel]:
        """Compile the kernel in a background thread."""
        return compile_pool().submit(self, *properties)


def float_bits(number: float) -> int:
    """A float32 as an argument of a kernel: its bits in the lower half of an int64."""
    return struct.unpack("<q", struct.pack("<fi", number, 0))[0]


@functools.cache
def compile_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "localllm-compile")


@functools.cache
def openmp() -> Any:
    """Load the GNU OpenMP runtime that torch ships, or return None where it ships none."""
    paths = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not paths:
        return None
    library = ctypes.CDLL(str(paths[0]))
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return library


@functools.cache
def llvm_target() -> llvm.Target:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


@functools.cache
def cpu_supported() -> bool:
    """Return whether this processor has the instructions that kernels need, and is little-endian."""
    machine = platform.machine().lower()
    if processor.forced_level() == "baseline":
        return False
    if machine in ("x86_64", "amd64"):
        return processor.reaches_level(features(), "avx2")
    return machine in ("aarch64", "arm64")


def compile_llvm(text: str) -> llvm.ExecutionEngine:
    """Compile and optimize LLVM IR for the processor at hand; machine code is cached on disk."""
    cpu = processor.target_cpu()
    flags = ",".join(f"{'+' if present else '-'}{name}" for name, present in sorted(features().items()))
    machine = llvm_target().create_target_machine(cpu=cpu, features=flags, opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    key = (text, cpu, flags, llvmlite.__version__, *map(str, llvm.llvm_version_info))
    cached = read_cached(key)
    if cached is None:
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    if cached is None:
        engine.set_object_cache(notify_func=lambda _, code: write_cached(key, code))
    else:
        engine.set_object_cache(getbuffer_func=lambda _: cached)
    engine.finalize_object()
    return engine


def cache_path(key: tuple[str, ...]) -> Path:
    """Path of a kernel's machine code below the cache folder."""
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return Settings.from_environment().cache / "kernels" / f"{name}.o"


def read_cached(key: tuple[str, ...]) -> bytes | None:
    """Return cached machine code, or None where the file is missing, unreadable or not what was written."""
    try:
        content = cache_path(key).read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_cached(key: tuple[str, ...], code: bytes) -> None:
    """Write digest and machine code atomically; a cache that cannot be written is skipped."""
    path = cache_path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)

"""Programs to machine code, and machine code on as many cores as torch uses.

The parts run on torch's own threads, through the OpenMP runtime that it brings: a second set of threads would
fight with them for the cores.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
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

# Machine code that an earlier process compiled, in `localllm/kernels` of the user's folder for caches.
#
# A file holds the digest of the rest and the code. What cannot be read, or is not what was written, is compiled
# again; what cannot be written, is compiled by the next process again.
DIGEST_BYTES = 32


def cache_path(key: tuple[str, ...]) -> Path:
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return Settings.from_environment().cache / "kernels" / f"{name}.o"


def read_cached(key: tuple[str, ...]) -> bytes | None:
    try:
        content = cache_path(key).read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_cached(key: tuple[str, ...], code: bytes) -> None:
    path = cache_path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(draft, path)


P = TypeVarTuple("P")
# What a thread of OpenMP begins with. How many there are it asks: they may be fewer than were wanted.
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
    """A program that can be called: with the integers that it takes, addresses and counts."""

    def __init__(self, write: Callable[[Program], None], name: str, count: int):
        """write: lays out the program; count: of its arguments."""
        program = Program(name, processor.byte_product(features()))
        write(program)
        text = program.to_llvm()
        self.engine = compile_llvm(text + OPENMP_ENTRY.format(name=name) if openmp() else text)
        self.argument_array: type[ctypes.Array[ctypes.c_int64]] = ctypes.c_int64 * count
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.run_part = kind(self.engine.get_function_address(name))
        self.run_thread = openmp() and ctypes.c_void_p(self.engine.get_function_address(f"{name}_thread"))

    def __call__(self, *arguments: int) -> None:
        """In as many parts as torch uses threads."""
        parts = torch.get_num_threads()
        slots = self.argument_array(*arguments)
        if parts == 1:
            self.run_part(slots, 0, 1)
        elif self.run_thread:
            openmp().GOMP_parallel(self.run_thread, slots, parts, 0)
        else:
            run_in_parts(lambda part, parts: self.run_part(slots, part, parts))

    def run_single(self, *arguments: int) -> None:
        """In one part, by the thread that calls."""
        self.run_part(self.argument_array(*arguments), 0, 1)


class CompileOnce(Generic[*P]):
    """A program for each set of properties, compiled when it is first asked for; who asks meanwhile waits."""

    def __init__(self, compiled: Callable[[*P], CompiledKernel]):
        self.compile = compiled
        self.compiled_kernels: dict[tuple[*P], CompiledKernel] = {}
        self.lock = threading.Lock()

    def __call__(self, *properties: *P) -> CompiledKernel:
        if properties not in self.compiled_kernels:
            with self.lock:
                if properties not in self.compiled_kernels:
                    self.compiled_kernels[properties] = self.compile(*properties)
        return self.compiled_kernels[properties]

    def compile_ahead(self, *properties: *P) -> Future[CompiledKernel]:
        """Compile it beside whatever else is done."""
        return compile_pool().submit(self, *properties)


@functools.cache
def compile_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "localllm-compile")


@functools.cache
def openmp() -> Any:
    """GNU's OpenMP runtime if torch has brought one, else None."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
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
    """Are the programs' instructions in this processor, and its bytes in their order?"""
    machine = platform.machine().lower()
    if processor.forced_level() == "baseline":
        return False
    if machine in ("x86_64", "amd64"):
        return processor.reaches_level(features(), "avx2")
    return machine in ("aarch64", "arm64")


def compile_llvm(text: str) -> llvm.ExecutionEngine:
    """Optimized for the processor at hand; what was compiled once is found again by the next process."""
    cpu = processor.target_cpu()
    wanted = ",".join(f"{'+' if there else '-'}{name}" for name, there in sorted(features().items()))
    machine = llvm_target().create_target_machine(cpu=cpu, features=wanted, opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    made_of = (text, cpu, wanted, llvmlite.__version__, *map(str, llvm.llvm_version_info))
    known = read_cached(made_of)
    if known is None:
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    if known is None:
        engine.set_object_cache(notify_func=lambda _, code: write_cached(made_of, code))
    else:
        engine.set_object_cache(getbuffer_func=lambda _: known)
    engine.finalize_object()
    return engine

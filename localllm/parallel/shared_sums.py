"""All-reduce and all-gather of the ranks on the CPUs of one machine, through memory that all of them map.

Each rank copies its tensor to its own part of the memory, raises its counter, spins until the others have raised
theirs, and adds up all parts in the order of ranks, so that every rank has the same bits. In gloo, each sum passes
through four threads that sleep until another wakes them, for longer than the products between two sums take. vLLM
does the same for its CPU backend (csrc/cpu/shm.cpp).
"""

import ctypes
import functools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from localllm.hardware.processor import kernels_supported
from localllm.runtime.kernels.cpu.compile import compile_llvm, llvm_target, load_code

COUNTER_BYTES = 128  # so that no two counters are in the same line of a cache
PART_BYTES = 1 << 20  # of a tensor; larger ones are summed piece by piece
SPINS = 2000  # 20 to 100 us, after which other programs may have the core
YIELD_S = 0.005  # after which the rank sleeps: another one does something else, or has ended
SLEEP_S = 0.0002
# Publish what was written before by raising the rank's own counter, and wait for the counters of all ranks.
MEET = """
declare void @{pause}

define i64 @meet(ptr %counters, i64 %rank, i64 %ranks, i64 %sum, i64 %spins) {{
entry:
  %own_offset = mul i64 %rank, {counter_bytes}
  %own = getelementptr i8, ptr %counters, i64 %own_offset
  store atomic i64 %sum, ptr %own release, align 8
  br label %next_rank
next_rank:
  %other = phi i64 [0, %entry], [%following, %ready]
  %is_last = icmp eq i64 %other, %ranks
  br i1 %is_last, label %all_ready, label %begin
begin:
  %offset = mul i64 %other, {counter_bytes}
  %counter = getelementptr i8, ptr %counters, i64 %offset
  br label %look
look:
  %left = phi i64 [%spins, %begin], [%fewer, %wait]
  %value = load atomic i64, ptr %counter acquire, align 8
  %is_ready = icmp sge i64 %value, %sum
  br i1 %is_ready, label %ready, label %wait
wait:
  call void @{pause_call}
  %fewer = sub i64 %left, 1
  %is_spent = icmp eq i64 %fewer, 0
  br i1 %is_spent, label %late, label %look
ready:
  %following = add i64 %other, 1
  br label %next_rank
all_ready:
  ret i64 1
late:
  ret i64 0
}}
"""
# The spin-wait hint to the core (x86: pause), as declared and as called, by LLVM's name of the architecture.
PAUSES = {"x86-64": ("llvm.x86.sse2.pause()", "llvm.x86.sse2.pause()")}
PAUSES |= dict.fromkeys(("aarch64", "arm64"), ("llvm.aarch64.hint(i32)", "llvm.aarch64.hint(i32 1)"))


def shared_sums_supported() -> bool:
    return kernels_supported() and llvm_target().name in PAUSES


def memory_bytes(ranks: int) -> int:
    """Return the size of the memory that so many ranks share."""
    return ranks * (COUNTER_BYTES + 2 * PART_BYTES)


class CompiledMeet:
    """The compiled function of `MEET`."""

    def __init__(self) -> None:
        declaration, call = PAUSES[llvm_target().name]
        text = MEET.format(pause=declaration, pause_call=call, counter_bytes=COUNTER_BYTES)
        self.engine = load_code(compile_llvm(text))  # which has the code
        signature: Any = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 4)
        self.function = signature(self.engine.get_function_address("meet"))


compiled_meet = functools.cache(CompiledMeet)


class SharedSums:
    """The sums and gathered tensors of one rank, which all ranks compute in the same order."""

    def __init__(self, descriptor: int, rank: int, ranks: int, check: Callable[[float], object]):
        """descriptor: of an open file of `memory_bytes`, zero at first, which is not closed; check: called while
        others are waited for, with the seconds so far, and raises if one of them has ended"""
        self.rank = rank
        self.ranks = ranks
        self.check = check
        self.compiled = compiled_meet()
        self.memory = torch.frombuffer(mmap.mmap(descriptor, memory_bytes(ranks)), dtype=torch.uint8)
        self.sums = 0  # and gathered tensors so far, which the counter says
        # Two sets of parts take turns: a rank that writes for the next sum may be ahead of one that still reads.
        parts = self.memory[ranks * COUNTER_BYTES :].view(2, ranks, PART_BYTES)
        self.parts = {dtype: parts.view(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, and return the result: x itself if it is contiguous.

        16-bit parts are added in float32 and rounded once. Raises what `check` raises.
        """
        x = x.contiguous()
        for piece in x.view(-1).split(PART_BYTES // x.element_size()):
            torch.sum(self.share(piece), 0, out=piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x [T, columns] of all ranks side by side. Raises what `check` raises."""
        gathered = x.new_empty(len(x), self.ranks, x.shape[1])
        rows = max(1, PART_BYTES // (x.shape[1] * x.element_size()))
        for piece, target in zip(x.split(rows), gathered.split(rows), strict=True):
            parts = self.share(piece.reshape(-1))
            target.copy_(parts.view(self.ranks, *piece.shape).transpose(0, 1))
        return gathered.flatten(1)

    def share(self, x: Tensor) -> Tensor:
        """Return x [N] of all ranks, [ranks, N], which the next but one call overwrites."""
        self.sums += 1
        parts = self.parts[x.dtype][self.sums % 2, :, : len(x)]
        parts[self.rank].copy_(x)
        if not self.meet(SPINS):
            self.wait()
        return parts

    def meet(self, spins: int) -> int:
        """Return whether all ranks have written their parts, after the given number of looks at each."""
        return self.compiled.function(self.memory.data_ptr(), self.rank, self.ranks, self.sums, spins)

    def wait(self) -> None:
        began = time.monotonic()
        while not self.meet(1):
            waited = time.monotonic() - began
            if waited < YIELD_S:
                os.sched_yield()
            else:
                time.sleep(SLEEP_S)
                self.check(waited)

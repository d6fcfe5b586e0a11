"""Parallel work on a CPU, cut into one part per core, each part in one thread.

For many small operations: torch's own threads synchronize after each operation, which takes as long as the
operation itself. Operations release the interpreter's lock, so that Python threads run in parallel.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import torch

from localllm.hardware.processor import count_cores

# For smaller models, two threads wait for each other longer than they save (docs/lab-log.md).
SMALL_MODEL_BYTES = 40_000_000
OMP_PAUSE_SOFT = 1  # OpenMP 5.0, omp_pause_resource_t


def threads_for(weight_bytes: int, requested: int | None) -> int:
    """Return the number of threads for a model with so many bytes of weights.

    By default as many as torch uses, but not more than there are cores, of a hybrid processor performance cores:
    threads have equal shares of a product, and would wait for those on slower cores or for an SMT sibling.
    """
    if requested or weight_bytes < SMALL_MODEL_BYTES:
        return requested or 1
    return min(torch.get_num_threads(), cores() or torch.get_num_threads())


cores = functools.cache(count_cores)


@functools.cache
def thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "localllm-part", initializer=torch.set_num_threads, initargs=(1,))


def run_in_parts(work: Callable[[int, int], None]) -> None:
    """Call `work(part, parts)` in threads, with as many parts as the calling thread may use threads.

    Each call has the caller's context variables.
    """
    parts = torch.get_num_threads()
    if parts == 1:
        work(0, 1)
        return

    def run(part: int) -> None:
        with torch.inference_mode():  # inference mode is a setting of each thread
            work(part, parts)

    for future in [thread_pool().submit(copy_context().run, run, part) for part in range(parts)]:
        future.result()


@functools.cache
def openmp() -> Any:
    """Load the GNU OpenMP runtime that torch ships, or return None where it ships none."""
    paths = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    return ctypes.CDLL(str(paths[0])) if paths else None


def end_openmp_threads() -> None:
    """End the OpenMP threads that belong to the calling thread; its next parallel operation starts them again.

    Each thread with parallel operations has a team of its own. As soon as all teams together have more threads
    than there are processors, GNU OpenMP lets none of them spin for the next operation: they sleep, and waking
    them takes longer than most operations of a decode step.
    """
    if library := openmp():
        library.omp_pause_resource_all(OMP_PAUSE_SOFT)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads for the operations of this thread in the block."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)

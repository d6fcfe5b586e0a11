"""Work that is cut into parts, one a core, each part in one thread.

For many small operations: torch's own threads meet after each of them, which takes as long as the operation. They
let go of the interpreter's lock, so Python threads run beside each other.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import torch

SMALL_MODEL_BYTES = 40_000_000  # two threads wait for each other longer than they help (docs/lab-log.md)


def threads_for(weight_bytes: int, requested: int | None) -> int:
    """How many threads the products of a model with so many bytes of weights get."""
    return requested or (1 if weight_bytes < SMALL_MODEL_BYTES else torch.get_num_threads())


@functools.cache
def thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "localllm-part", initializer=torch.set_num_threads, initargs=(1,))


def run_in_parts(work: Callable[[int, int], None]) -> None:
    """Calls `work(part, parts)` for each of as many parts as the calling thread may use threads, with its context
    variables."""
    parts = torch.get_num_threads()
    if parts == 1:
        work(0, 1)
        return

    def run(part: int) -> None:
        with torch.inference_mode():  # a setting of each thread
            work(part, parts)

    for done in [thread_pool().submit(copy_context().run, run, part) for part in range(parts)]:
        done.result()

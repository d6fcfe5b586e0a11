"""Threads that wait for the network, and need not be waited for."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def thread_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Waits for them at its end; not after Ctrl-C, because a connection that is silent has seconds to go."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        broken_off = isinstance(sys.exception(), KeyboardInterrupt)
        pool.shutdown(wait=not broken_off, cancel_futures=broken_off)

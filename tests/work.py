"""Measures the work of a function in place of its seconds, which a slow machine or a collection of garbage may
multiply: tests compare what few and many elements cost, or what they cost with a constant.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TRIES = 5


class LineCount:
    """The lines of Python that were run. Loops within the interpreter's own functions count as nothing."""

    lines = 0

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        self.lines += event == "line"
        return self.trace


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile, which halts all threads for a second where a test process has a large heap."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def counted_lines() -> Iterator[LineCount]:
    """Count lines that this thread runs in functions called meanwhile, those of libraries included."""
    count, before = LineCount(), sys.gettrace()
    with without_collections():  # whose callbacks and finalizers are lines, too
        sys.settrace(count.trace)
        try:
            yield count
        finally:
            sys.settrace(before)


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs."""
    with counted_lines() as count:
        work()
    return count.lines


def growth_of_time(prepare: Callable[[int], Callable[[], object]], size: int, factor: int) -> float:
    """Return how many times as long `factor * size` elements take as `size`: about `factor` if the time is linear,
    and its square if it is quadratic. For work that is not done by lines of Python, of some milliseconds at least.

    prepare: returns the function whose time is taken, for a number of elements
    """
    seconds: dict[int, list[float]] = {size: [], factor * size: []}
    with without_collections():
        for _ in range(TRIES):
            for count, took in seconds.items():
                work = prepare(count)
                began = time.thread_time()
                work()
                took.append(time.thread_time() - began)
    return min(seconds[factor * size]) / min(seconds[size])

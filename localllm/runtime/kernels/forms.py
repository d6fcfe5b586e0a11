"""Whether what is computed of a token may depend on how many others stand beside it in the step.

Torch's products of many rows are faster than those that give each row the same bits alone; a model that was loaded
as deterministic does without them. It says so around each of its steps, in the thread that runs it, so that models
beside it are not asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BY_ROW_ALONE: ContextVar[bool] = ContextVar("by_row_alone", default=False)


def by_row_alone() -> bool:
    """Must each row have the bits that it has alone, however many there are?"""
    return BY_ROW_ALONE.get()


@contextmanager
def each_row_alone(wanted: bool) -> Iterator[None]:
    """Of all that is computed meanwhile in this thread."""
    before = BY_ROW_ALONE.set(wanted)
    try:
        yield
    finally:
        BY_ROW_ALONE.reset(before)

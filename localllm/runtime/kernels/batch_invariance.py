"""Whether what is computed of a token may depend on how many others stand beside it in the step.

Torch's products of many rows are faster than those that give each row the same bits alone; a model that was loaded
as deterministic does without them. It says so around each of its steps, in the thread that runs it, so that models
beside it are not asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BATCH_INVARIANT: ContextVar[bool] = ContextVar("by_row_alone", default=False)


def batch_invariant() -> bool:
    """Must each row have the bits that it has alone, however many there are?"""
    return BATCH_INVARIANT.get()


@contextmanager
def batch_invariance(enabled: bool) -> Iterator[None]:
    """Of all that is computed meanwhile in this thread."""
    before = BATCH_INVARIANT.set(enabled)
    try:
        yield
    finally:
        BATCH_INVARIANT.reset(before)

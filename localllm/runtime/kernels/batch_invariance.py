"""Whether the result of a token may depend on the number of other tokens in its step.

Torch's products of many rows are faster than products with the same bits for each row regardless of the others; a
model that was loaded as deterministic uses the latter. Its runner enables this around its steps, for its thread
only, so that other models in the process are not affected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BATCH_INVARIANT: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def batch_invariant() -> bool:
    """Return whether each row must have the same bits regardless of the number of rows."""
    return BATCH_INVARIANT.get()


@contextmanager
def batch_invariance(enabled: bool) -> Iterator[None]:
    """Set batch invariance for everything that this thread computes in the block."""
    token = BATCH_INVARIANT.set(enabled)
    try:
        yield
    finally:
        BATCH_INVARIANT.reset(token)

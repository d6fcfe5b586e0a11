"""Python's garbage collector in processes that stream answers."""

import gc
from typing import Final

DEFAULT_THRESHOLDS: Final = gc.get_threshold()
# Full collections are made rarer. The default of the last threshold is 10: about one full collection per second.
THRESHOLDS: Final = (700, 10, 100)


def freeze_garbage() -> None:
    """Exclude all current objects from garbage collection, after collecting once.

    A full collection takes 0.1 to 0.2 s where torch is loaded, and delays the tokens of all answers and the keys
    of the terminal UI. Call this when a model is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def unfreeze_garbage() -> None:
    """Include frozen objects again, which may have become garbage, such as a closed model."""
    gc.unfreeze()
    gc.set_threshold(*DEFAULT_THRESHOLDS)

"""Python's collector of garbage, kept from holding up keys: what there is when a conversation begins it need not
go through again and again, which takes a tenth of a second, and all of what came since only now and then.
"""

import gc
from typing import Final

GC_THRESHOLDS: Final = (700, 10, 1000)  # the last is 10 as Python has it: all was gone through once a second


def freeze_garbage() -> None:
    """What is there now, once it holds no garbage; until `let_go`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def unfreeze_garbage() -> None:
    """What was left out may be garbage now, such as a model that is closed."""
    gc.unfreeze()

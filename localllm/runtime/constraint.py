"""What a grammar is to the engine: which tokens may come next in one answer. Knows nothing of text."""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import LocalLLMError

# Waits until they are known: of each position int32 [ceil(vocab / 32)], where bit t % 32 of word t // 32 is set if
# the token t may come; None: any may.
MaskProvider = Callable[[], ListLike[NDArray[np.int32] | None]]


class Constraint(Protocol):
    """One answer's, which it follows by `advance`."""

    @property
    def finished(self) -> bool:
        """Nothing more may come, not even an end token."""
        ...

    @property
    def fault(self) -> LocalLLMError | None:
        """Why it cannot be followed further: then nothing may come, and this answer ends with it."""
        ...

    def begin(self, drafts: ListLike[int]) -> MaskProvider:
        """Begin to find out, while the model computes, what may come at each of the 1 + len(drafts) next
        positions, as if the drafts came. They are allowed."""
        ...

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token, which is allowed."""
        ...

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that spell what alone can come next; the model may still spell it otherwise."""
        ...

    def allowed(self, drafts: ListLike[int]) -> list[int]:
        """The longest beginning of the drafts that may come."""
        ...

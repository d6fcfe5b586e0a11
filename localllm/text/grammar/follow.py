"""Follows one answer through its grammar: which tokens may come next, found out beside the model's own work."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from localllm.errors import LocalLLMError

TokenMask = NDArray[np.int32]
WORD_BITS = 32  # bits


class GrammarFollower:
    """A `Constraint` of the engine, driven by one thread. Where the grammar's limits are reached nothing may come,
    and `fault` says why: other answers go on.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, size: int, threads: Executor):
        """`matcher`: of this answer alone; `vocabulary`: its tokens; `size`: how many of them the model has."""
        self._matcher = matcher
        self._all_words = -(-vocabulary // WORD_BITS)
        self._words = -(-size // WORD_BITS)
        known = np.uint32(
            2 ** (size % WORD_BITS or WORD_BITS) - 1
        )  # of the last word, the tokens that the model has
        self._last = known.view(np.int32)
        self._threads = threads
        self._under_way: Future[list[TokenMask | None]] | None = None

    @property
    def finished(self) -> bool:
        """Nothing more may come, not even an end token."""
        return self._settled().is_stopped() and not self.fault

    @property
    def fault(self) -> LocalLLMError | None:
        """Why the grammar cannot be followed further."""
        reason = self._settled().get_error()
        if not reason:
            return None
        remedy = "make the schema or the grammar simpler"
        return LocalLLMError(f"the grammar cannot be followed further: {reason.splitlines()[0]}", remedy)

    def begin(self, drafts: Sequence[int]) -> Callable[[], list[TokenMask | None]]:
        """Begin to find the masks of the 1 + len(drafts) next positions, int32 [ceil(size / 32)] each: bit t % 32
        of word t // 32 is set if the token t may come. None behind a draft that may not."""
        self._settled()
        self._under_way = self._threads.submit(self._masks, list(drafts))
        return self._under_way.result

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token."""
        self._settled().consume_token(token_id)

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that spell what alone can come next."""
        return self._settled().compute_ff_tokens()[:most]

    def allowed(self, drafts: Sequence[int]) -> list[int]:
        """The longest beginning of the drafts that may come."""
        drafts = list(drafts)
        return drafts[: self._settled().validate_tokens(drafts)]

    def _settled(self) -> LLMatcher:
        """The matcher, once no thread works with it."""
        if self._under_way:
            self._under_way.result()
        return self._matcher

    def _masks(self, drafts: list[int]) -> list[TokenMask | None]:
        masks = np.zeros((1 + len(drafts), self._all_words), np.int32)
        found: list[TokenMask | None] = []
        consumed = 0
        for mask, draft in zip(masks, [*drafts, -1], strict=True):
            fill_next_token_bitmask(self._matcher, mask[None])
            if self._matcher.is_error():  # the mask says anything then
                return [np.zeros_like(mask[: self._words])] * len(masks)
            mask[self._words - 1] &= self._last
            found.append(mask[: self._words])
            if draft < 0 or not mask[draft // WORD_BITS] >> draft % WORD_BITS & 1:
                break
            self._matcher.consume_token(draft)
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        return found + [None] * (len(masks) - len(found))

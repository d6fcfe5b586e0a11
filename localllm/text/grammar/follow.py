"""Follows one answer through its grammar: computes which tokens may come next, in parallel with the model."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from localllm.errors import LocalLLMError
from localllm.text.grammar.closing import CHECKS, AnswerCloser

TokenMask = NDArray[np.int32]
WORD_BITS = 32  # bits


class GrammarFollower:
    """A `Constraint` of the engine, driven by one thread. If the grammar's limits are reached, no token is allowed
    and `fault` holds the reason; other answers continue.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: int,
        size: int,
        threads: Executor,
        closer: AnswerCloser | None = None,
        max_tokens: int | None = None,
    ):
        """`matcher`: of this answer alone; `vocabulary`: its tokens; `size`: how many of them the model has;
        `closer`: closes an answer that comes close to `max_tokens`."""
        self._matcher = matcher
        self._closer = closer if max_tokens is not None else None
        self._most = self._left = max_tokens or 0  # tokens that may come, and those that still may
        self._closing: list[int] | None = None  # what comes from here on; None: what the model will
        self._checked: int | None = None  # what was left when this was found out last
        self.cut = False
        """Was it closed before the model ended it?"""
        self._all_words = -(-vocabulary // WORD_BITS)
        self._words = -(-size // WORD_BITS)
        valid_bits = np.uint32(
            2 ** (size % WORD_BITS or WORD_BITS) - 1
        )  # of the last word, the tokens that the model has
        self._last = valid_bits.view(np.int32)
        self._threads = threads
        self._under_way: Future[list[TokenMask | None]] | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more may follow, not even an end token."""
        return self._settled().is_stopped() and not self.fault

    @property
    def fault(self) -> LocalLLMError | None:
        """Why the grammar cannot be followed further, if so."""
        reason = self._settled().get_error()
        if not reason:
            return None
        remedy = "make the schema or the grammar simpler"
        return LocalLLMError(f"the grammar cannot be followed further: {reason.splitlines()[0]}", remedy)

    def begin(self, drafts: Sequence[int]) -> Callable[[], list[TokenMask | None]]:
        """Start computing the masks of the 1 + len(drafts) next positions, int32 [ceil(size / 32)] each: bit t %
        32 of word t // 32 is set if token t is allowed. None after a draft that is not allowed.
        """
        self._settled()
        self._under_way = self._threads.submit(self._masks, list(drafts))
        return self._under_way.result

    def advance(self, token_id: int) -> None:
        """Consume the answer's next token."""
        matcher = self._settled()
        self._check_room()
        if self._closing is not None:
            self.cut = True
            self._closing = self._closing[1:]
        matcher.consume_token(token_id)
        self._left -= 1

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that are the only possible continuation."""
        matcher = self._settled()
        return (matcher.compute_ff_tokens() if self._closing is None else self._closing)[:most]

    def allowed(self, drafts: Sequence[int]) -> list[int]:
        """Return the longest allowed prefix of the drafts."""
        drafts = list(drafts)
        if self._closing is not None:
            same = [draft == token for draft, token in zip(drafts, self._closing, strict=False)]
            return drafts[: [*same, False].index(False)]
        return drafts[: self._settled().validate_tokens(drafts)]

    def _settled(self) -> LLMatcher:
        """Return the matcher once no thread uses it."""
        if self._under_way:
            self._under_way.result()
        return self._matcher

    def _check_room(self) -> None:
        """Find out whether the answer is to be closed from here on."""
        if self._closing is None and self._checked != self._left:
            self._checked = self._left
            self._closing = self._closing_path(self._left)

    def _closing_path(self, left: int) -> list[int] | None:
        """The way to the end, where it must be taken now."""
        if self._closer is None or (left not in CHECKS and left != self._most):
            return None
        return self._closer.closing_path(self._matcher, left) or None

    def _masks(self, drafts: list[int]) -> list[TokenMask | None]:
        self._check_room()
        closing, left = self._closing, self._left
        masks = np.zeros((1 + len(drafts), self._all_words), np.int32)
        results: list[TokenMask | None] = []
        consumed = 0
        for mask, draft in zip(masks, [*drafts, -1], strict=True):
            if closing is None and left < self._left:
                closing = self._closing_path(left)
            if closing:
                mask[closing[0] // WORD_BITS] |= np.array(1 << closing[0] % WORD_BITS, np.uint32).view(np.int32)
            else:
                fill_next_token_bitmask(self._matcher, mask[None])
            if closing is not None and not closing and self._closer:
                self._closer.keep_ends(mask)
            if self._matcher.is_error():  # the mask is undefined then
                return [np.zeros_like(mask[: self._words])] * len(masks)
            mask[self._words - 1] &= self._last
            results.append(mask[: self._words])
            if draft < 0 or not mask[draft // WORD_BITS] >> draft % WORD_BITS & 1:
                break
            self._matcher.consume_token(draft)
            closing, left = closing and closing[1:], left - 1
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        return results + [None] * (len(masks) - len(results))

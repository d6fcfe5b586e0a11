"""Follows one answer through its grammar: computes which tokens may come next, in parallel with the model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from localllm.errors import LocalLLMError

MAX_CLOSING_TOKENS = 512  # of a path to the end
SPARE_TOKENS = 2
CHECK_RATIO = 1.1  # of the tokens left at one check to those at the next
FIRST_CHECK = 8192  # tokens left at the first check
EVERY_TOKEN_FROM = 96  # tokens left from which on each is checked: several brackets may open between two checks
# Characters tried in this order: inside a string, where a backslash is allowed, and elsewhere.
IN_STRING = (b'"',)
ELSEWHERE = (
    b"}",
    b"]",
    b'"',
    b",",
    b":",
    b"@",
    b"-",
    b".",
    b"0",
    b"1",
    b"2",
    b"3",
    b"f",
    b"t",
    b"n",
    b"T",
    b"Z",
    b"a",
)
BACKSLASH = b"\\"
TokenMask = NDArray[np.int32]
WORD_BITS = 32  # bits


def _checks() -> frozenset[int]:
    left, checks = float(FIRST_CHECK), set[int]()
    while left > EVERY_TOKEN_FROM:
        checks.add(round(left))
        left /= CHECK_RATIO
    return frozenset(checks) | frozenset(range(EVERY_TOKEN_FROM + 1))


CHECKS = _checks()
"""Numbers of tokens left at which an answer is checked for whether it must be closed."""


@dataclass(frozen=True)
class AnswerCloser:
    """Finds the tokens that close a constrained answer before its token limit, for one model.

    Where an answer is closed depends on its tokens and on how many are left alone, so that drafts and other
    answers do not change it.
    """

    vocab_size: int
    token_ids: Mapping[bytes, int]  # single characters, as far as the model has tokens for them
    reasoning_end: Sequence[int]  # tokens that end the model's reasoning; empty if it has none
    end_ids: Collection[int]

    def closing_path(self, matcher: LLMatcher, left: int) -> list[int] | None:
        """Return the tokens that close the answer if they must begin here, with `left` tokens left.

        None while more tokens fit, and if no path to the end is known.
        """
        path, longest = self._paths(matcher, left)
        next_check = left - 1 if left <= EVERY_TOKEN_FROM else left / CHECK_RATIO - 1
        return path if longest + SPARE_TOKENS > next_check else None

    def _paths(self, matcher: LLMatcher, left: int) -> tuple[list[int] | None, int]:
        """Return a short path to the end, and the length of the longest after anything the model may open next."""
        limit = min(left, MAX_CLOSING_TOKENS)
        if self.reasoning_end and (path := self._path_behind(matcher, self.reasoning_end, limit)) is not None:
            return path, len(path)
        path = self._greedy_path(matcher.deep_copy(), limit)
        if path is None:
            return None, 0
        in_string = matcher.validate_tokens(self._spelled(BACKSLASH))
        longest = len(path)
        for opening in (b'",',) if in_string else (b",", b",{", b"{", b"[", b"[{", b'"'):
            ids = self._spelled(opening)
            if ids and matcher.validate_tokens(ids) == len(ids):
                behind = self._path_behind(matcher, ids, MAX_CLOSING_TOKENS)
                longest = max(longest, MAX_CLOSING_TOKENS if behind is None else len(behind))
        return path, longest

    def _spelled(self, text: bytes) -> list[int]:
        return [token for i in range(len(text)) if (token := self.token_ids.get(text[i : i + 1])) is not None]

    def _path_behind(self, matcher: LLMatcher, begin: Sequence[int], limit: int) -> list[int] | None:
        """Return a path to the end that begins with these tokens."""
        follower, begin = matcher.deep_copy(), list(begin)
        if follower.validate_tokens(begin) < len(begin) or len(begin) > limit:
            return None
        for token in begin:
            follower.consume_token(token)
        rest = self._greedy_path(follower, limit - len(begin))
        return None if rest is None else begin + rest

    def keep_ends(self, mask: NDArray[np.int32]) -> None:
        """Forbid everything but end tokens, in place."""
        ends = np.zeros_like(mask)
        for token in self.end_ids:
            ends[token // 32] |= np.array(1 << token % 32, np.uint32).view(np.int32)
        mask &= ends

    def _greedy_path(self, matcher: LLMatcher, limit: int) -> list[int] | None:
        path: list[int] = []
        mask = np.zeros((1, -(-self.vocab_size // 32)), np.int32)
        while not (matcher.is_stopped() or matcher.is_accepting()):
            forced = matcher.compute_ff_tokens()
            if not forced:
                fill_next_token_bitmask(matcher, mask)
                token = None if matcher.is_error() else self._next(mask[0])
                forced = [] if token is None else [token]
            if not forced or len(path) + len(forced) > limit:
                return None
            for token in forced:
                if not matcher.consume_token(token):
                    return None
            path += forced
        return None if matcher.is_error() else path

    def _next(self, mask: NDArray[np.int32]) -> int | None:
        in_string = self._allows(mask, self.token_ids.get(BACKSLASH))
        order = IN_STRING + ELSEWHERE if in_string else ELSEWHERE
        best = next((token for text in order if self._allows(mask, token := self.token_ids.get(text))), None)
        if best is None:
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            best = next((int(token) for token in allowed if token not in self.end_ids), None)
        return best

    @staticmethod
    def _allows(mask: NDArray[np.int32], token: int | None) -> bool:
        return token is not None and bool(mask[token // 32] >> token % 32 & 1)


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

"""How an answer in JSON comes to its end where it has no room left: the tokens that close what is open.

An answer is closed at a position that depends on its tokens and on what is left of them alone, so that drafts and
other answers change nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

MAX_CLOSING_TOKENS = 512  # of one way to the end
SPARE_TOKENS = 2
CHECK_RATIO = 1.1  # between what is left of the answer at one check and at the next
FIRST_CHECK = 8192  # tokens left
EVERY_TOKEN_FROM = 96  # tokens left, from where on each is a check: several things may open between two
# What is tried inside a string, where a backslash may come, and elsewhere, in this order.
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


def _checks() -> frozenset[int]:
    left, found = float(FIRST_CHECK), set[int]()
    while left > EVERY_TOKEN_FROM:
        found.add(round(left))
        left /= CHECK_RATIO
    return frozenset(found) | frozenset(range(EVERY_TOKEN_FROM + 1))


CHECKS = _checks()
"""Tokens that are left of an answer where it is found out whether it must be closed."""


@dataclass(frozen=True)
class AnswerCloser:
    """Of one model."""

    vocab_size: int
    token_ids: Mapping[bytes, int]  # single characters, as far as the model has tokens for them
    reasoning_end: Sequence[int]  # tokens that end a model's thoughts; empty: it has none
    end_ids: Collection[int]

    def closing_path(self, matcher: LLMatcher, left: int) -> list[int] | None:
        """The tokens that lead to the end of the answer, where they must come from here on, of `left` that may;
        None while there is room for more, and where there is no way."""
        path, longest = self._ways(matcher, left)
        next_check = left - 1 if left <= EVERY_TOKEN_FROM else left / CHECK_RATIO - 1
        return path if longest + SPARE_TOKENS > next_check else None

    def _ways(self, matcher: LLMatcher, left: int) -> tuple[list[int] | None, int]:
        """A short way from here to the end, and the length of the longest behind what the model may open next."""
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
        return [
            token
            for place in range(len(text))
            if (token := self.token_ids.get(text[place : place + 1])) is not None
        ]

    def _path_behind(self, matcher: LLMatcher, begin: Sequence[int], limit: int) -> list[int] | None:
        """A way to the end that begins like this."""
        follower, begin = matcher.deep_copy(), list(begin)
        if follower.validate_tokens(begin) < len(begin) or len(begin) > limit:
            return None
        for token in begin:
            follower.consume_token(token)
        rest = self._greedy_path(follower, limit - len(begin))
        return None if rest is None else begin + rest

    def keep_ends(self, mask: NDArray[np.int32]) -> None:
        """Let nothing but an end token come, of what may."""
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

"""Derives the merges of BPE tokenizers whose files only order their tokens: by SentencePiece scores or tiktoken
ranks.
"""

from collections.abc import Container, Iterable
from itertools import groupby
from operator import itemgetter


def derive_merges(
    ranked_tokens: Iterable[tuple[float, str]], known_tokens: Container[str]
) -> list[tuple[str, str]]:
    """Return all pairs of known tokens that form a token, in merge order.

    ranked_tokens: tokens with their ranks; the lowest rank is merged first. Both formats merge the leftmost of
    pairs with equal rank; the library ranks every pair, so pairs with equal rank are sorted by the length of their
    left part, which corresponds to merging from the left. Source: `SentencePieceExtractor` of transformers.
    """
    merges: list[tuple[str, str]] = []
    for _, group in groupby(sorted(ranked_tokens, key=itemgetter(0)), key=itemgetter(0)):
        pairs = [
            (left, right)
            for _, token in group
            for i in range(len(token) - 1, 0, -1)
            if (left := token[:i]) in known_tokens and (right := token[i:]) in known_tokens
        ]
        merges += sorted(pairs, key=lambda pair: (-len(pair[0]), -len(pair[1])))
    return merges

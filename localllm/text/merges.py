"""The merges of a BPE whose file gives only an order of its tokens: SentencePiece by scores, tiktoken by ranks."""

from collections.abc import Container, Iterable
from itertools import groupby
from operator import itemgetter


def derive_merges(
    ranked_tokens: Iterable[tuple[float, str]], known_tokens: Container[str]
) -> list[tuple[str, str]]:
    """All pairs of known tokens that make a token, the ones to merge first at the begin.

    ranked_tokens: tokens with their ranks; the lowest rank is merged first. Both formats merge the leftmost of
    pairs of
    equal rank; the library ranks every pair, so pairs of one rank go by the longer left part, as whoever merges
    from the left has it. Source: `SentencePieceExtractor` of transformers.
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

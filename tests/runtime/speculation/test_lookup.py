"""Prompt lookup against an exhaustive search."""

from hypothesis import given
from hypothesis import strategies as st

from localllm.runtime.speculation.lookup import INDEX_CHUNK_TOKENS, MAX_MATCH_LEN, MIN_MATCH_LEN, PromptLookup

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest(tokens: list[int]) -> int:
    """Length of the longest suffix that also occurs earlier."""
    end = len(tokens)
    lengths = (
        sum(1 for _ in range(place) if tokens[place - _ - 1 : place] == tokens[end - _ - 1 : end])
        for place in range(1, end)
    )
    return max(lengths, default=0)


@given(TEXTS, st.integers(0, 60))
def test_the_longest_match_is_found_from_any_start(tokens: list[int], known: int) -> None:
    growing = tokens[:known]
    lookup = PromptLookup(growing)
    for token in [*tokens[known:], None]:
        expected = longest(growing)
        if expected < MIN_MATCH_LEN:
            assert lookup.match() == 0 and lookup.continuation(4) == []
        else:
            # A search compares so many, and only the newest of frequent runs; what is followed may be longer.
            assert lookup.match() <= expected
            assert lookup.match_len >= min(expected, MAX_MATCH_LEN)
            before = growing[: lookup.continuation_start]
            assert before[-lookup.match_len :] == growing[-lookup.match_len :]
        if token is not None:
            growing.append(token)


@given(TEXTS)
def test_the_later_of_two_longest_matches_wins(tokens: list[int]) -> None:
    lookup = PromptLookup(tokens)
    if length := lookup.match():
        ends = [
            place for place in range(length, len(tokens)) if tokens[place - length : place] == tokens[-length:]
        ]
        assert lookup.continuation_start == max(ends)


@given(TEXTS, st.integers(1, 20))
def test_the_continuation_of_a_match_is_drafted_and_loops_continue(tokens: list[int], most: int) -> None:
    lookup = PromptLookup(tokens)
    lookup.match()
    told = lookup.continuation(most)
    assert len(told) == (most if lookup.match_len else 0)
    for place, token in enumerate(told):
        assert token == [*tokens, *told][lookup.continuation_start + place]


def test_a_long_prompt_is_taken_up_in_pieces() -> None:
    tokens = [n % 1000 for n in range(3 * INDEX_CHUNK_TOKENS)]
    lookup = PromptLookup(tokens)
    found = [lookup.match() for _ in range(3)]
    assert found[:2] == [0, 0] and found[2] >= MAX_MATCH_LEN
    assert lookup.continuation(3) == [144, 145, 146]

"""The longest run that stood before, against a search of everything."""

from hypothesis import given
from hypothesis import strategies as st

from localllm.runtime.speculation.lookup import LEAST, LONGEST, PIECE, Lookup

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest(tokens: list[int]) -> int:
    """How many of the last tokens stand together before, ending anywhere but at the end."""
    end = len(tokens)
    lengths = (
        sum(1 for _ in range(place) if tokens[place - _ - 1 : place] == tokens[end - _ - 1 : end])
        for place in range(1, end)
    )
    return max(lengths, default=0)


@given(TEXTS, st.integers(0, 60))
def test_the_longest_match_is_found_wherever_one_begins_to_look(tokens: list[int], known: int) -> None:
    growing = tokens[:known]
    lookup = Lookup(growing)
    for token in [*tokens[known:], None]:
        expected = longest(growing)
        if expected < LEAST:
            assert lookup.match() == 0 and lookup.continuation(4) == []
        else:
            # A search compares so many, and only the newest of frequent runs; what is followed may be longer.
            assert lookup.match() <= expected
            assert lookup.length >= min(expected, LONGEST)
            before = growing[: lookup.source]
            assert before[-lookup.length :] == growing[-lookup.length :]
        if token is not None:
            growing.append(token)


@given(TEXTS)
def test_of_two_longest_the_later_is_taken(tokens: list[int]) -> None:
    lookup = Lookup(tokens)
    if length := lookup.match():
        ends = [
            place for place in range(length, len(tokens)) if tokens[place - length : place] == tokens[-length:]
        ]
        assert lookup.source == max(ends)


@given(TEXTS, st.integers(1, 20))
def test_what_came_behind_it_is_told_and_a_loop_goes_on(tokens: list[int], most: int) -> None:
    lookup = Lookup(tokens)
    lookup.match()
    told = lookup.continuation(most)
    assert len(told) == (most if lookup.length else 0)
    for place, token in enumerate(told):
        assert token == [*tokens, *told][lookup.source + place]


def test_a_long_prompt_is_taken_up_in_pieces() -> None:
    tokens = [n % 1000 for n in range(3 * PIECE)]
    lookup = Lookup(tokens)
    found = [lookup.match() for _ in range(3)]
    assert found[:2] == [0, 0] and found[2] >= LONGEST
    assert lookup.continuation(3) == [144, 145, 146]

from hypothesis import given
from hypothesis import strategies as st

from localllm.text.detokenizer import StopStrings

WORDS = st.text("ab<", max_size=8)


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    watch, given_out, found = StopStrings(stops), [], False
    for piece in pieces:
        text, found = watch.push(piece)
        given_out.append(text)
    return [*given_out, watch.finish()], found


def naive(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4).map(tuple), st.lists(WORDS, max_size=10))
def test_stop_strings_match_a_naive_search_for_any_cut(stops: tuple[str, ...], pieces: list[str]):
    given_out, found = run(stops, pieces)
    assert ("".join(given_out), found) == naive(stops, "".join(pieces))


@given(st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4).map(tuple), st.lists(WORDS, max_size=10))
def test_only_what_may_become_a_stop_string_is_held_back(stops: tuple[str, ...], pieces: list[str]):
    watch, text, shown = StopStrings(stops), "", ""
    for piece in pieces:
        more, found = watch.push(piece)
        text, shown = text + piece, shown + more
        if found:
            break
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(
            text.endswith(stop[:count])
            for stop in stops
            for count in range(len(held) + 1, len(stop))
            if count <= len(text)
        )


def test_a_stop_string_over_three_tokens_is_not_shown():
    assert run(("\nUser:",), ["Hi", " there\n", "Us", "er: who"]) == (["Hi", " there", "", "", ""], True)


def test_a_false_start_of_a_stop_string_is_shown():
    assert run(("\nUser:",), ["a\nUs", "ual"]) == (["a", "\nUsual", ""], False)


def test_held_text_is_shown_at_the_end():
    assert run(("END",), ["the EN"]) == (["the ", "EN"], False)


def test_after_a_stop_string_nothing_is_shown():
    watch = StopStrings(("x",))
    assert watch.push("axb") == ("a", True)
    assert watch.push("more") == ("", True)
    assert watch.finish() == ""


def test_a_thousand_stop_strings_cost_no_more_than_their_begun_ones():
    watch = StopStrings(tuple(f"<stop number {number}>" for number in range(1000)))
    for _ in range(1000):
        assert watch.push("<stop numb!") == ("<stop numb!", False)
    assert watch.push("so <stop number 99") == ("so ", False)
    assert watch.push("9> and on") == ("", True)


def test_without_stop_strings_text_passes():
    assert run((), ["a", "b"]) == (["a", "b", ""], False)

import pytest
from rich.cells import cell_len

from localllm.tui.inspector.record import AnswerToken, DraftStatus
from localllm.tui.inspector.tokens import TokenFlow, printable


def flow_of(*texts: str, width: int = 10) -> TokenFlow:
    flow = TokenFlow(width)
    flow.extend([AnswerToken(n, n, text) for n, text in enumerate(texts)])
    return flow


def lines(flow: TokenFlow) -> list[str]:
    return ["".join(placed.text for placed in line) for line in flow.lines]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (" a", "·a"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("", "∅"),
        ("\x1b[2J", "␛[2J"),
        ("\x9b", "\ufffd"),
        ("a\u202eb", "a\ufffdb"),  # turns the writing around
        ("\u200b", "\ufffd"),
        ("\u0301", "◌\u0301"),
        ("日本", "日本"),
    ],
)
def test_control_characters_are_shown_and_not_executed(text: str, seen: str) -> None:
    assert printable(text) == seen


def test_tokens_are_not_cut_where_they_fit_on_a_line() -> None:
    assert lines(flow_of("Once", " upon", " a", " time")) == ["Once·upon", "·a·time"]


def test_a_token_longer_than_a_line_goes_over_several() -> None:
    flow = flow_of("ab", "x" * 25, "c")
    assert lines(flow) == ["ab", "x" * 10, "x" * 10, "xxxxxc"]
    assert [flow.token_at(line, 0) for line in range(4)] == [0, 1, 1, 1]


def test_a_line_ends_where_the_text_does() -> None:
    assert lines(flow_of("a", "\n", "b", ".\n\n", "c")) == ["a↵", "b.↵↵", "c"]


@pytest.mark.parametrize("width", [2, 3, 7, 40])
def test_no_line_is_wider_than_the_screen_and_no_token_is_lost(width: int) -> None:
    texts = ["日本語", " a", "\x00", "👩‍🚀", "é", "word" * 9, "\n", "", "z"]
    flow = flow_of(*texts * 3, width=width)
    assert all(cell_len(line) <= width for line in lines(flow))
    assert {placed.index for line in flow.lines for placed in line} == set(range(27))


def test_growing_gives_the_same_as_all_at_once() -> None:
    tokens = [AnswerToken(n, n, text) for n, text in enumerate(["one", " two", "\n", " three", " four"] * 9)]
    flow = TokenFlow(12)
    for end in range(len(tokens) + 1):
        flow.extend(tokens[:end])
    whole = TokenFlow(12)
    whole.extend(tokens)
    assert lines(flow) == lines(whole)


def test_adjacent_tokens_of_one_draft_share_a_mark() -> None:
    guesses = [
        DraftStatus.NONE,
        DraftStatus.ACCEPTED,
        DraftStatus.ACCEPTED,
        DraftStatus.REJECTED,
        DraftStatus.NONE,
    ]
    flow = TokenFlow(40)
    flow.extend(
        [
            AnswerToken(n, n, letter, (), guess)
            for n, (letter, guess) in enumerate(zip("abcde", guesses, strict=True))
        ]
    )
    assert lines(flow) == ["a✓bc✗de"]


def test_up_and_down_keep_the_column() -> None:
    flow = flow_of("aaaa", "bbbb", "cccc", "dddd", "eee")
    assert lines(flow) == ["aaaabbbb", "ccccdddd", "eee"]
    assert [
        flow.token_lines_away(1, 1),
        flow.token_lines_away(3, -1),
        flow.token_lines_away(3, 1),
        flow.token_lines_away(0, -5),
        flow.token_lines_away(0, 9),
    ] == [
        3,
        1,
        4,
        0,
        4,
    ]


def test_below_an_end_of_line_there_may_be_nothing_yet() -> None:
    flow = flow_of("a", "\n")
    assert flow.lines[-1] == [] and flow.token_lines_away(1, 1) in (0, 1)

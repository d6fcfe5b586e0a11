"""Draft tokens are shown while an answer streams."""

import io
import os
import pty
import sys
import termios

import pytest

from localllm.cli.answer import DraftStatusLine, cursor_column_after
from localllm.request import GenerationEvent

STEP = [GenerationEvent(1, "a", (1,), drafted=3), GenerationEvent(1, "b", (2,), accepted=True)]


class Screen(io.StringIO):
    """A terminal with ten columns that records its output."""

    def __init__(self) -> None:
        super().__init__()
        self.terminal, self.program = pty.openpty()
        termios.tcsetwinsize(self.program, (24, 10))

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.program

    def close(self) -> None:
        os.close(self.terminal)
        os.close(self.program)
        super().close()


def watched(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, events: list[GenerationEvent] | None = None
) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    drafts = DraftStatusLine()
    for event in events or STEP:
        drafts.add_event(event)
        drafts.hide()
        drafts.show()
    drafts.finish()
    return stream.getvalue()


def test_a_pipe_gets_one_line_at_the_end(monkeypatch):
    assert watched(monkeypatch, io.StringIO()) == "draft: 3 drafted, 1 accepted, 2.00 tokens/step\n"


def test_a_terminal_sees_the_count_below_the_answer_and_no_trace_of_it(monkeypatch):
    with Screen() as screen:
        seen = watched(monkeypatch, screen)
    assert "draft: 3 drafted, 0 accepted, 1.00 tokens/step\x1b8" in seen
    # Each line that was shown is emptied before anything else is written.
    assert seen.count("\x1b[2K") == 2 * seen.count("tokens/step\x1b8") == 4
    assert seen.endswith("\x1b[2K\x1b8draft: 3 drafted, 1 accepted, 2.00 tokens/step\n")


def test_nothing_is_shown_while_the_last_column_is_full_since_terminals_differ_in_where_the_cursor_is(monkeypatch):
    events = [GenerationEvent(1, "nine cols", (1,)), GenerationEvent(1, "x", (2,)), GenerationEvent(1, "y", (3,))]
    with Screen() as screen:
        seen = watched(monkeypatch, screen, events)
    assert seen.count("tokens/step\x1b8") == 2  # after nine characters and after eleven


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 3),
        ("abc", 6),
        ("abcdefg", 10),
        ("abcdefgh", 1),
        ("ab\ncd", 2),
        ("\t", 8),
        ("\t\t\t", 9),
        ("e\u0301", 4),
    ],
)
def test_the_column_follows_line_ends_tabs_and_marks(text, column):
    assert cursor_column_after(text, 3, 10) == column


def test_a_wide_character_does_not_stand_in_two_lines():
    assert cursor_column_after("猫", 8, 10) == 10
    assert cursor_column_after("猫", 9, 10) == 2

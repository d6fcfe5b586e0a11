"""An answer is printed while it streams, with its draft tokens."""

import io
import os
import pty
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.answer import (
    FLUSH_INTERVAL_S,
    AnswerOptions,
    DraftStatusLine,
    _print_events,
    cursor_column_after,
    has_more_soon,
)
from localllm.cli.io import StdoutWriter
from localllm.errors import UsageError
from localllm.request import EventType, GenerationEvent, Request, SamplingParams

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


class Buffered:
    """An answer whose events arrive in groups, and how much was flushed before each."""

    def __init__(self, groups: list[list[GenerationEvent]], flushed: Callable[[], str]):
        self.events = [(event, len(group) - n > 1) for group in groups for n, event in enumerate(group)]
        self.flushed, self.seen, self.has_more = flushed, list[str](), False

    def __iter__(self) -> "Buffered":
        return self

    def __next__(self) -> GenerationEvent:
        self.seen.append(self.flushed())
        if not self.events:
            raise StopIteration
        event, self.has_more = self.events.pop(0)
        return event

    def close(self) -> None: ...


class Flushed(io.StringIO):
    """A pipe whose reader sees what was flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


@pytest.mark.parametrize("draft", [False, True])
def test_events_that_are_there_already_are_flushed_together(monkeypatch: pytest.MonkeyPatch, draft: bool) -> None:
    """Nothing waits for an event that is not there yet, and a line about drafts follows every token."""
    pipe, errors = Flushed(), Flushed()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", errors)
    words = [GenerationEvent(1, word, (1,)) for word in "abcdef"]
    thought = GenerationEvent(1, "hm", (1,), kind=EventType.REASONING)
    silent = GenerationEvent(1, "", (1,))
    groups = [words[:1], [words[1], words[2], silent], [words[3], thought, words[4]], words[5:]]
    stream = Buffered(groups, lambda: pipe.flushed)
    model: Any = SimpleNamespace(submit=lambda request: stream)
    options = AnswerOptions(raw=True, as_json=False, verbose=False, fail_on_length=False, draft=draft)
    _print_events(model, Request((1,), SamplingParams(), 0.0), options, StdoutWriter())
    together = ["", "a", "a", "a", "abc", "abc", "abcd", "abcde", "abcdef"]
    each = ["", "a", "ab", "abc", "abc", "abcd", "abcd", "abcde", "abcdef"]
    assert stream.seen == (each if draft else together)


def test_text_that_waits_is_flushed_when_an_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Flushed()
    monkeypatch.setattr(sys, "stdout", pipe)

    def answer() -> Iterator[GenerationEvent]:
        yield GenerationEvent(1, "the begin", (1,))
        raise UsageError("broken")

    class Failing:
        has_more, events = True, answer()

        def __iter__(self) -> Iterator[GenerationEvent]:
            return self.events

        def close(self) -> None: ...

    model: Any = SimpleNamespace(submit=lambda request: Failing())
    options = AnswerOptions(raw=True, as_json=False, verbose=False, fail_on_length=False)
    with pytest.raises(UsageError, match="broken"):
        _print_events(model, Request((1,), SamplingParams(), 0.0), options, StdoutWriter())
    assert pipe.flushed == "the begin"


def test_only_what_follows_a_flush_closely_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    stream: Any = SimpleNamespace(has_more=False)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        stream.has_more = True

    monkeypatch.setattr(time, "sleep", sleep)
    assert not has_more_soon(stream, time.perf_counter() - FLUSH_INTERVAL_S)
    assert not slept
    assert has_more_soon(stream, time.perf_counter())
    assert 0 < slept[0] <= FLUSH_INTERVAL_S

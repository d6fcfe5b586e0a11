"""What is guessed, shown while an answer comes."""

import io
import sys

import pytest

from localllm.cli.drafts import DraftLine
from localllm.request import GenerationEvent

STEP = [GenerationEvent(1, "a", (1,), drafted=3), GenerationEvent(1, "b", (2,), accepted=True)]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    drafts = DraftLine()
    for event in STEP:
        drafts.count(event)
        drafts.hide()
        drafts.show()
    drafts.finish()
    return stream.getvalue()


def test_a_pipe_gets_one_line_at_the_end(monkeypatch):
    assert watched(monkeypatch, io.StringIO()) == "draft: 3 drafted, 1 accepted, 2.00 tokens/step\n"


def test_a_terminal_sees_the_count_below_the_answer_and_no_trace_of_it(monkeypatch):
    seen = watched(monkeypatch, Screen())
    assert "draft: 3 drafted, 0 accepted, 1.00 tokens/step\x1b8" in seen
    # Each line that was shown is emptied before anything else is written.
    assert seen.count("\x1b[2K") == 2 * seen.count("tokens/step\x1b8") == 4
    assert seen.endswith("\x1b[2K\x1b8draft: 3 drafted, 1 accepted, 2.00 tokens/step\n")

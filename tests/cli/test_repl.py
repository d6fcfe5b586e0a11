"""The line editor in a pseudo-terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.cli.conftest import LAUNCHER

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[()].|\x1b[=>]|[\r\x0f]")
# Without a controlling terminal, Ctrl-C is no signal. (pty.fork would do, but not beside torch's threads.)
TAKE_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A program with stdin, stdout and stderr in a terminal of 80x24."""

    def __init__(self, *arguments, program=(sys.executable, str(LAUNCHER)), **environment):
        self.fd, inner = pty.openpty()
        termios.tcsetwinsize(self.fd, (24, 80))
        command = [sys.executable, "-c", TAKE_TERMINAL, *program, *arguments]
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | environment
        self.process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment)
        os.close(inner)
        self.text = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def see(self, expected, seconds=60):
        """Wait until the text appears after previously seen text; return everything up to it."""
        end = time.monotonic() + seconds
        while expected not in self.text:
            ready = select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{expected!r} did not appear after {self.text!r}"
            self.text += ESCAPES.sub("", os.read(self.fd, 65536).decode(errors="replace"))
        before, self.text = self.text.split(expected, 1)
        return before + expected

    def raw_until(self, expected, seconds=60):
        """Like `see`, but with escape sequences, for output that has not been read yet."""
        end, text = time.monotonic() + seconds, ""
        while expected not in text:
            ready = select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{expected!r} did not appear in {text!r}"
            text += os.read(self.fd, 65536).decode(errors="replace")
        return text

    def leave(self):
        """Wait for the end of the program; return its exit code."""
        while True:
            try:
                if not os.read(self.fd, 65536):
                    break
            except OSError:  # how Linux tells that the other end of a terminal is closed
                break
        return self.process.wait(timeout=100)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments, **environment):
        opened.append(Terminal(*arguments, **environment))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_conversation_from_hello_to_goodbye(terminal, model, tmp_path):
    chat = terminal("run", model, "--plain", "--system", "be brief")
    chat.see("tiny on cpu in float32, context 4096 tokens")
    chat.see(">>> ")
    chat.type("hello\r")
    chat.see("2[be brief]:hello\n")
    chat.see(">>> ")
    chat.type("/shwo\r")
    chat.see("error: there is no command /shwo; did you mean /show?")
    chat.see(">>> ")
    chat.type('"""first\rsecond"""\r')
    chat.see("4[be brief]:first\nsecond\n")
    chat.see(">>> ")
    chat.type("/save one\r")
    chat.see("saved")
    chat.see(">>> ")
    chat.type(CTRL_D)
    assert chat.leave() == 0
    saved = json.loads((tmp_path / "home" / "chats" / "one.json").read_text())
    assert [turn["question"] for turn in saved["turns"]] == ["hello", "first\nsecond"]
    history = tmp_path / "home" / "history"
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o77 == 0


def test_a_conversation_is_saved_automatically_and_resumed(terminal, model, tmp_path):
    chat = terminal("run", model, "--plain")
    chat.see(">>> ")
    chat.type("one\r")
    chat.see("1:one\n")
    chat.see(">>> ")
    chat.type("slowly " * 50 + "\r")
    chat.see("3:slowly")
    chat.type(CTRL_C)
    chat.see("(stopped)")
    chat.see(">>> ")
    chat.process.kill()
    (name,) = (path.stem for path in (tmp_path / "home" / "chats").glob("*.json"))
    chat = terminal("run", model, "--plain", "--resume", "last", "--temperature", "0")
    chat.see(f"note: resuming {name}, 'one', after 2 questions")
    chat.see(">>> ")
    chat.type("/edit\r")
    chat.see("slowly slowly")
    chat.type("\x01two \x0b\r")
    chat.see("3:two")
    chat.see(">>> ")
    chat.type("/regenerate\r")
    chat.see("3:two")
    chat.see(">>> ")
    chat.type("/branch\r")
    chat.see("* 3")
    chat.see(">>> ")
    chat.type("/bye\r")
    assert chat.leave() == 0
    saved = json.loads((tmp_path / "home" / "chats" / f"{name}.json").read_text())
    assert [turn["question"].strip()[:6] for turn in saved["turns"]] == ["one", "slowly", "two", "two"]
    assert saved["params"]["temperature"] == 0


def test_files_are_brought_in_and_dropped(terminal, model, tmp_path):
    (tmp_path / "two words.txt").write_text("text of it")
    chat = terminal("run", model, "--plain")
    chat.see(">>> ")
    chat.type(f"\x1b[200~{tmp_path}/two\\ words.txt\x1b[201~what?\r")
    chat.see("text of it")
    chat.see("what?\n")
    chat.see(">>> ")
    chat.type(f"@{tmp_path}\r")
    chat.see("is a folder; use a file in it")
    chat.see(">>> ")
    chat.type("/bye\r")
    assert chat.leave() == 0


def test_thoughts_are_dim_and_precede_the_answer(terminal, model):
    chat = terminal("run", model, "--plain", NO_COLOR="", TERM="xterm")
    chat.see(">>> ")
    chat.type("thinking\r")
    raw = chat.raw_until("1:thinking\r\n")
    assert "\x1b[2mlet me \x1b[0m\x1b[2msee␇\x1b[0m\r\n\r\n1:thinking" in raw
    chat.type("/bye\r")
    assert chat.leave() == 0


def test_without_colours_thoughts_have_a_heading(terminal, model):
    one = terminal("run", model, "thinking", NO_COLOR="1")
    one.raw_until("(thinking)\r\nlet me see␇\r\n\r\n1:thinking\r\n")
    assert one.leave() == 0


def test_ctrl_c_stops_the_answer_and_the_conversation_continues(terminal, model):
    chat = terminal("run", model, "--plain")
    chat.see(">>> ")
    chat.type("slowly " * 50 + "\r")
    chat.see("1:slowly")
    chat.type(CTRL_C)
    chat.see("(stopped)")
    chat.see(">>> ")
    chat.type("/show\r")
    chat.see("messages     2")
    chat.type("next\r")
    chat.see("3:next")
    chat.type("/bye\r")
    assert chat.leave() == 0


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(terminal, model):
    chat = terminal("run", model, "--plain")
    chat.see(">>> ")
    chat.type("slowly " * 5 + "\r")
    chat.see("1:slowly")
    chat.type("/show\r")
    assert "/show" not in chat.see(">>> ")
    chat.see("/show")
    chat.see("messages     2")
    chat.type("/bye\r")
    assert chat.leave() == 0


def test_ctrl_c_at_the_prompt_clears_the_line(terminal, model):
    chat = terminal("run", model, "--plain")
    chat.see(">>> ")
    chat.type("half a thou")
    chat.see("thou")
    chat.type(CTRL_C)
    chat.see("(use /bye or Ctrl-D to leave)")
    chat.see(">>> ")
    chat.type("whole\r")
    chat.see("1:whole")
    chat.type("/exit\r")
    assert chat.leave() == 0


def test_pasted_lines_are_one_message(terminal, model):
    chat = terminal("run", model, "--plain")
    chat.see(">>> ")
    chat.type("\x1b[200~one\ntwo\x1b[201~\r")
    chat.see("1:one\ntwo\n")
    chat.type("/bye\r")
    assert chat.leave() == 0


def test_an_error_does_not_end_the_conversation(terminal, model):
    chat = terminal("run", model, "--plain", "--context", "40")
    chat.see(">>> ")
    chat.type("x" * 50 + "\r")
    chat.see("the prompt has 50 tokens and the context holds 40")
    chat.see("/undo and /clear shorten the conversation")
    chat.see(">>> ")
    chat.type("/set verbose\r")
    chat.see(">>> ")
    chat.type("hello\r")
    chat.see("1:hello\n")
    chat.see("TTFT")
    chat.type("/bye\r")
    assert chat.leave() == 0


def test_no_history_where_it_cannot_be_written(terminal, model):
    chat = terminal("run", model, "--plain", LOCALLLM_HOME="/dev/null/home")
    chat.see("note: input history is not saved")
    chat.see(">>> ")
    chat.type(CTRL_D)
    assert chat.leave() == 0


@pytest.mark.parametrize("flag", ["--raw", "--json", "--fail-on-length", "--logprobs=0", "--tools=x"])
def test_flags_of_one_answer_start_no_conversation(terminal, model, flag):
    chat = terminal("run", model, "--plain", flag)
    chat.see(f"error: {flag.split('=')[0]} needs a prompt; add a prompt, or leave the flag out")
    assert chat.leave() == 2


def test_one_answer_in_a_terminal_ends_its_line_and_moves_no_cursor(terminal, model):
    one = terminal("run", model, "escape")
    one.see("␛[31mred␇ \ufffd1m\n")
    assert one.leave() == 0


def test_no_word_of_a_file_or_of_an_error_moves_the_cursor(terminal, model):
    templates = [{"name": "default\x1b[31m", "template": ""}]
    Path(model, "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    one = terminal("show", model)
    one.raw_until("default␛[31m\r\n")
    assert one.leave() == 0
    one = terminal("show", "./no\x1b[31m\x9b1m")
    one.raw_until("error: there is no folder or file ./no␛[31m\ufffd1m; ")
    assert one.leave() == 8


def test_an_answer_that_was_cut_is_noted_in_a_terminal(terminal, model):
    one = terminal("run", model, "hello", "--max-tokens", "3")
    one.see("1:h\n")
    one.see("note: the answer was cut by --max-tokens (3)")
    assert one.leave() == 0

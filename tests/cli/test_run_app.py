"""The app as `localllm run` starts it in a pseudo-terminal: start, refusal, suspension and exit."""

import json
import os
import signal
import time

import pytest

from tests.cli.test_repl import CTRL_D, terminal  # noqa: F401 (a fixture)

SHOWN = "\x1b[?1049h"  # the screen that programs have for themselves
LEFT = "\x1b[?1049l"


@pytest.fixture
def app(terminal, model):  # noqa: F811
    chat = terminal("run", model)
    assert SHOWN in chat.raw_until("Say something")
    return chat


@pytest.mark.slow
def test_a_conversation_from_hello_to_goodbye(app, tmp_path):
    app.type("hello\r")
    app.raw_until("1:hello")
    app.type(CTRL_D)
    app.raw_until(LEFT)
    assert app.leave() == 0
    (kept,) = (tmp_path / "home" / "chats").glob("*.json")
    assert "1:hello" in kept.read_text() and json.dumps("hello") in kept.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_signal_restores_the_terminal_and_saves_the_conversation(app, tmp_path, number):
    app.type("slowly " * 60 + "\r")
    app.raw_until("1:")
    time.sleep(0.3)
    app.process.send_signal(number)
    app.raw_until(LEFT)
    assert app.leave() == -number
    (kept,) = (tmp_path / "home" / "chats").glob("*.json")
    assert "1:slowly" in kept.read_text()


@pytest.mark.slow
def test_ctrl_z_suspends_and_fg_continues(app):
    app.type("\x1a")
    app.raw_until(LEFT)
    assert os.WIFSTOPPED(os.waitpid(app.process.pid, os.WUNTRACED)[1])
    app.process.send_signal(signal.SIGCONT)
    app.raw_until("Say something")
    app.type("hello\r")
    app.raw_until("1:hello")


def test_an_unsupported_terminal_suggests_plain(terminal, model):  # noqa: F811
    chat = terminal("run", model, TERM="dumb")
    chat.see("error: this terminal (TERM=dumb) cannot show the app; add --plain to chat line by line")
    assert chat.leave() == 2


def test_a_missing_model_is_reported_after_the_app_has_left(terminal, tmp_path):  # noqa: F811
    chat = terminal("run", str(tmp_path / "nowhere"))
    chat.raw_until("Esc Back")
    chat.type("\x1b")
    told = chat.raw_until("error: ")
    assert LEFT in told
    assert chat.leave() != 0


def test_plain_is_for_conversations(localllm, model):
    code, _, told = localllm("run", model, "--plain", "hello")
    assert code == 2
    assert "--plain is for conversations" in told

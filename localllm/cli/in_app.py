"""The conversation in the app: whether this terminal can show it, and what the program leaves behind."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from localllm.cli.io import clear_sign_of_life, is_terminal
from localllm.cli.machine import LocalMachine
from localllm.cli.signals import die_by_signal
from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from localllm.errors import LocalLLMError, UsageError
from localllm.protocol.model import Model
from localllm.settings import Settings


# The conversation that `localllm run` holds: a new one, or a kept one that it goes on with.
def open_session(
    llm: Model, flags: Mapping[str, Any], given: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Session:
    """given: fields of SamplingParams; arguments: of the template. What was given as a flag also holds for a kept
    conversation, whose own the rest is. Raises UsageError where there is none such."""
    chat = Chat(llm, dataclasses.replace(llm.default_params, **given), flags["system"], arguments)
    session = Session(llm, chat, Settings.from_environment().home / "chats", flags["verbose"])
    if flags["resume"]:
        session.load(flags["resume"])
        chat.params = dataclasses.replace(chat.params, **given)
        chat.template_arguments |= arguments
        chat.system = flags["system"] or chat.system
    return session


MIN_COLUMNS, MIN_LINES = 40, 12  # the smallest window that the app is of use in
PLAIN_REMEDY = "--plain talks line by line"


def check_terminal() -> None:
    """Raises UsageError for one that the app cannot be shown in."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        raise UsageError("this terminal (TERM=dumb) cannot show the app", PLAIN_REMEDY)
    if not is_terminal(sys.stderr):
        raise UsageError("the app is drawn on stderr, which is no terminal", f"leave it there; {PLAIN_REMEDY}")
    columns, lines = shutil.get_terminal_size()
    if columns < MIN_COLUMNS or lines < MIN_LINES:
        room = f"the app needs {MIN_COLUMNS}x{MIN_LINES} cells and the window has {columns}x{lines}"
        raise UsageError(room, f"make it larger; {PLAIN_REMEDY}")


def run_app(flags: Mapping[str, Any], begin: Callable[[Model], Session]) -> None:
    """Hold a conversation until the person leaves; flags: those of `run`.

    Raises UsageError where the terminal cannot show it, and what kept a model from being ready. A signal that
    asks the program to end does that, when the terminal is as it was before.
    """
    check_terminal()
    clear_sign_of_life()
    from localllm.tui.app import ChatApp  # 0.2 s that whoever cannot see it need not wait for

    app = ChatApp(LocalMachine(flags), flags["model"], begin, Settings.from_environment().home)
    app.run()
    if app.exit_signal:
        die_by_signal(app.exit_signal)
    if app.error:
        raise app.error
    if app.return_code:
        raise LocalLLMError("the app has ended before its time", "what it says above shows where")

"""The conversation in a terminal: a line editor, the answers as they come, slash commands."""

import re
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from localllm.cli.answer import Parts
from localllm.cli.commands import Session, execute, unquote
from localllm.cli.io import AnswerWriter, note
from localllm.cli.report import metrics_block
from localllm.client.model import ServedModel
from localllm.conversation.chat import Chat
from localllm.conversation.limits import what_cut
from localllm.errors import ContextOverflow, LocalLLMError
from localllm.model import Model
from localllm.request import FinishReason, SamplingParams
from localllm.settings import Settings

LOCAL_MODES = 3  # place of c_lflag in what tcgetattr gives
OPENS_QUOTES = re.compile(r'\s*(/system\s+)?"""')


def converse(
    llm: Model,
    params: SamplingParams,
    system: str | None,
    template_arguments: Mapping[str, Any],
    *,
    verbose: bool,
) -> None:
    """Hold a conversation until the person leaves."""
    home = Settings.from_environment().home
    session = Session(llm, Chat(llm, params, system, template_arguments), home / "chats", verbose)
    read = line_editor(home)
    at = f", at {llm.server.url}" if isinstance(llm, ServedModel) else ""
    note(f"{llm.name} on {llm.device} in {llm.dtype}, context {llm.context} tokens{at}")
    if not llm.has_chat_template:
        note(f"note: {llm.name} has no chat template: it continues the text of this conversation")
    while True:
        try:
            line = read()
            if line.startswith("/"):
                print(execute(session, line))
            elif text := unquote(line):
                answer(session, text)
        except KeyboardInterrupt:
            note("(/bye or Ctrl-D leaves)")
        except EOFError:
            return
        except ContextOverflow as error:
            note(f"error: {error}; /undo and /clear make room")
        except LocalLLMError as error:
            note(f"error: {error}")


def answer(session: Session, text: str) -> None:
    """Show the answer to one message as it comes; Ctrl-C stops it and keeps what was said."""
    shown, tokens, last = Parts(AnswerWriter()), 0, None
    try:
        with closing(session.chat.ask(text)) as events, unseen_keys():
            try:
                for event in events:
                    shown.write(event)
                    tokens += len(event.token_ids)
                    last = event
            finally:
                shown.finish()
    except KeyboardInterrupt:
        note("(stopped)")
        return
    if last and last.finish_reason == FinishReason.LENGTH:
        limit, remedy = what_cut(session.llm, session.chat.params, tokens)
        note(f"note: the answer was cut by {limit}; {remedy}")
    if last and last.metrics and session.verbose:
        note(metrics_block(last.metrics, last.seed))


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Keys pressed meanwhile do not appear in the middle of an answer; they wait for the next prompt."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    flags = termios.tcgetattr(fd)
    flags[LOCAL_MODES] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSANOW, flags)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def line_editor(home: Path) -> Callable[[], str]:
    """A function that reads one message: with history, and over several lines between triple quotes."""
    # With `multiline` Enter begins a new line instead of sending; so it does while quotes are open.
    editor: PromptSession[str] = PromptSession(
        history=history(home / "history"),
        multiline=Condition(lambda: has_open_quotes(get_app().current_buffer.text)),
        prompt_continuation="... ",
        placeholder=[("ansibrightblack", "Say something, or /? for help")],
    )
    return lambda: editor.prompt(">>> ")


def has_open_quotes(text: str) -> bool:
    opening = OPENS_QUOTES.match(text)
    return opening is not None and not text[opening.end() :].rstrip().endswith('"""')


def history(file: Path) -> History:
    """What was typed before, in a file for this user alone; without one where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    except OSError as error:
        note(f"note: no history is kept: {error}")
        return InMemoryHistory()
    return FileHistory(file)

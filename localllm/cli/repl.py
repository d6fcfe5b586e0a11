"""The conversation in a terminal: a line editor, the answers as they come, slash commands."""

import re
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from localllm.cli.answer import AnswerPrinter
from localllm.cli.io import StdoutWriter, note
from localllm.cli.report import metrics_block
from localllm.client.model import RemoteModel
from localllm.conversation.attach import dropped_file_references
from localllm.conversation.chat import AnswerEvents, length_limit
from localllm.conversation.commands import execute, strip_triple_quotes
from localllm.conversation.session import Session
from localllm.errors import ContextOverflow, LocalLLMError, UsageError
from localllm.files import reason_of
from localllm.formatting import printable
from localllm.request import FinishReason

TERMIOS_LFLAG = 3  # place of c_lflag in what tcgetattr gives
OPENING_QUOTES = re.compile(r'\s*(/system\s+)?"""')


def run_repl(session: Session) -> None:
    """Hold a conversation until the person leaves."""
    llm, read, draft = session.llm, line_editor(session.folder.parent), ""
    at = f", at {llm.server.url}" if isinstance(llm, RemoteModel) else ""
    note(f"{llm.name} on {llm.device} in {llm.dtype}, context {llm.context} tokens{at}")
    if not llm.has_chat_template:
        note(f"note: {llm.name} has no chat template: it continues the text of this conversation")
    if session.chat.turns:
        note(f"note: this goes on with {session.id}, {session.title!r}, after {len(session.chat.turns)} questions")
    while True:
        try:
            line, draft = read(draft), ""
            if line.startswith("/"):
                done = execute(session, line)
                if done.text:
                    print(printable(done.text))
                if done.start_answer:
                    stream_answer(session, done.start_answer)
                draft = done.edit_text or ""
            elif text := strip_triple_quotes(line):
                stream_answer(session, partial(session.ask, text))
        except KeyboardInterrupt:
            session.editing = None
            note("(/bye or Ctrl-D leaves)")
        except EOFError:
            return
        except ContextOverflow as error:
            note(f"error: {error}; /undo and /clear make room")
        except LocalLLMError as error:
            note(f"error: {error}")


def stream_answer(session: Session, ask: Callable[[], AnswerEvents]) -> None:
    """Show an answer as it comes, and keep it; Ctrl-C stops it and keeps what was said."""
    shown, tokens, last = AnswerPrinter(StdoutWriter()), 0, None
    try:
        with closing(ask()) as events, echo_off():
            try:
                for event in events:
                    shown.write(event)
                    tokens += len(event.token_ids)
                    last = event
            finally:
                shown.finish()
    except KeyboardInterrupt:
        note("(stopped)")
        save_session(session)
        return
    if last and last.finish_reason == FinishReason.LENGTH:
        limit, remedy = length_limit(session.llm, session.chat.params, tokens)
        note(f"note: the answer was cut by {limit}; {remedy}")
    if last and last.metrics and session.verbose:
        note(metrics_block(last.metrics, last.seed))
    save_session(session)


def save_session(session: Session) -> None:
    """Where it cannot be, once is enough to hear of it."""
    try:
        if told := session.save():
            note(f"note: {told}")
    except UsageError as error:
        session.autosave = False
        note(f"note: {error}; what is said from now on is not kept")


@contextmanager
def echo_off() -> Iterator[None]:
    """Keys pressed meanwhile do not appear in the middle of an answer; they wait for the next prompt."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    flags = termios.tcgetattr(fd)
    flags[TERMIOS_LFLAG] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSANOW, flags)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def line_editor(home: Path) -> Callable[[str], str]:
    """A function that reads one message, beginning with the text it is given: with history, and over several lines
    between triple quotes."""
    # With `multiline` Enter begins a new line instead of sending; so it does while quotes are open.
    editor: PromptSession[str] = PromptSession(
        history=open_history(home / "history"),
        multiline=Condition(lambda: has_open_quotes(get_app().current_buffer.text)),
        prompt_continuation="... ",
        placeholder=[("ansibrightblack", "Say something, or /? for help")],
        key_bindings=paste_key_bindings(),
    )
    return lambda draft: editor.prompt(">>> ", default=draft)


def paste_key_bindings() -> KeyBindings:
    """A path that is pasted becomes `@path`; any other paste stays what it is."""
    keys = KeyBindings()

    @keys.add(Keys.BracketedPaste)
    def paste(event: KeyPressEvent) -> None:
        # Terminals paste line ends as the Enter key sends them.
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(dropped_file_references(text) or text)

    return keys


def has_open_quotes(text: str) -> bool:
    opening = OPENING_QUOTES.match(text)
    return opening is not None and not text[opening.end() :].rstrip().endswith('"""')


def open_history(file: Path) -> History:
    """What was typed before, in a file for this user alone; without one where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    except OSError as error:
        note(f"note: no history is kept: {reason_of(error)}")
        return InMemoryHistory()
    return FileHistory(file)

"""`localllm run --plain`: a conversation line by line, with a line editor, streamed answers and slash commands."""

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

from localllm.cli.answer import AnswerPrinter, format_metrics
from localllm.cli.io import StdoutWriter, note
from localllm.client.model import RemoteModel
from localllm.conversation.attach import dropped_file_references
from localllm.conversation.chat import AnswerEvents, length_limit
from localllm.conversation.commands import execute, has_open_quotes, strip_triple_quotes
from localllm.conversation.session import Session
from localllm.errors import ContextOverflow, LocalLLMError, UsageError
from localllm.files import reason_of
from localllm.formatting import printable
from localllm.request import FinishReason

TERMIOS_LFLAG = 3  # index of c_lflag in the list of tcgetattr


def run_repl(session: Session) -> None:
    """Hold a conversation until the user leaves."""
    llm, read_message, draft = session.llm, line_editor(session.folder.parent), ""
    server = f", at {llm.server.url}" if isinstance(llm, RemoteModel) else ""
    note(f"{llm.name} on {llm.device} in {llm.dtype}, context {llm.context} tokens{server}")
    if not llm.has_chat_template:
        note(f"note: {llm.name} has no chat template, so it continues the text of the conversation")
    if session.chat.turns:
        note(f"note: resuming {session.id}, {session.title!r}, after {len(session.chat.turns)} questions")
    while True:
        try:
            line, draft = read_message(draft), ""
            if line.startswith("/"):
                result = execute(session, line)
                if result.text:
                    print(printable(result.text))
                if result.start_answer:
                    stream_answer(session, result.start_answer)
                draft = result.edit_text or ""
            elif text := strip_triple_quotes(line):
                stream_answer(session, partial(session.ask, text))
        except KeyboardInterrupt:
            session.editing = None
            note("(use /bye or Ctrl-D to leave)")
        except EOFError:
            return
        except ContextOverflow as error:
            note(f"error: {error}; /undo and /clear shorten the conversation")
        except LocalLLMError as error:
            note(f"error: {error}")


def stream_answer(session: Session, ask: Callable[[], AnswerEvents]) -> None:
    """Print an answer while it streams, and save the conversation; Ctrl-C stops the answer and saves its
    beginning."""
    printer, last = AnswerPrinter(StdoutWriter()), None
    try:
        with closing(ask()) as events, echo_off():
            try:
                for event in events:
                    printer.write(event)
                    last = event
            finally:
                printer.finish()
    except KeyboardInterrupt:
        note("(stopped)")
        save_session(session)
        return
    if last and last.finish_reason == FinishReason.LENGTH:
        limit, remedy = length_limit(session.llm, session.chat.params, last.metrics)
        note(f"note: the answer was cut by {limit}; {remedy}")
    if last and last.metrics and session.verbose:
        note(format_metrics(last.metrics, last.seed))
    save_session(session)


def save_session(session: Session) -> None:
    """Save the conversation; if that fails, turn saving off, so that the note appears once."""
    try:
        if warning := session.save():
            note(f"note: {warning}")
    except UsageError as error:
        session.autosave = False
        note(f"note: {error}; this conversation is no longer saved")


@contextmanager
def echo_off() -> Iterator[None]:
    """Turn off the echo of keys, so that those pressed during an answer appear only at the next prompt."""
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
    """Function that reads one message with history, starting from the given text."""
    # `multiline` makes Enter insert a line break instead of sending, which is right inside open triple quotes.
    editor: PromptSession[str] = PromptSession(
        history=open_history(home / "history"),
        multiline=Condition(lambda: has_open_quotes(get_app().current_buffer.text)),
        prompt_continuation="... ",
        placeholder=[("ansibrightblack", "Send a message, or /? for help")],
        key_bindings=paste_key_bindings(),
    )
    return lambda draft: editor.prompt(">>> ", default=draft)


def paste_key_bindings() -> KeyBindings:
    """Key bindings that turn a pasted path into `@path`, and leave any other pasted text as it is."""
    keys = KeyBindings()

    @keys.add(Keys.BracketedPaste)
    def paste(event: KeyPressEvent) -> None:
        # Terminals paste a line end as the Enter key sends it.
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(dropped_file_references(text) or text)

    return keys


def open_history(file: Path) -> History:
    """Input history in a file that only this user can read, or in memory if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    except OSError as error:
        note(f"note: input history is not saved: {reason_of(error)}")
        return InMemoryHistory()
    return FileHistory(file)

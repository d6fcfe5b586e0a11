"""The prompt: a text editor with history, and completion of commands after `/`, files after `@`, and earlier
messages. Independent of models.

Keys that it does not handle reach the screen: Ctrl-C, Ctrl-Z, Ctrl-D on an empty line, and Tab, Escape and the
page keys where they have no effect here.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static, TextArea

from localllm.conversation.attach import file_reference
from localllm.conversation.commands import has_open_quotes
from localllm.files import reason_of
from localllm.formatting import one_line
from localllm.tui.editor import Editor

PLACEHOLDER = "Say something, or ? for help"
QUEUED_TITLE = " sent after this answer; Esc takes it back "
BUSY_TITLE = " Esc stops the answer "
EDITING_TITLE = " Enter sends this on a new branch; Esc cancels "
OPEN_QUOTES_TITLE = ' """ and Enter send this '
SEARCHING_TITLE = " search history: type words, Enter takes one, Esc cancels "

COMMAND_PATTERN = re.compile(r"/\S*")
FILE_PATTERN = re.compile(r"""(?:^|(?<=\s))@(?:"(?P<quoted>[^"]*)|(?P<bare>[^\s"']*))$""")
MAX_SCANNED_FILES = 2000  # of a folder
MAX_SUGGESTIONS = 200
VISIBLE_SUGGESTIONS = 6

MAX_READ_BYTES = 2**20  # of the history, from its end: thousands of messages


@dataclass(frozen=True)
class Suggestion:
    """A completion of the text at the cursor."""

    text: str
    description: str = ""
    start_column: int = 0  # in the line of the cursor; the text from here to the cursor is replaced


class Suggestions(Static):
    """A short list with one selected line, hidden while it is empty."""

    DEFAULT_CSS = """
    Suggestions { display: none; height: auto; padding: 0 1; background: $panel; }
    """

    class Taken(Message):
        """The selected suggestion was clicked."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.suggestions: list[Suggestion] = []
        self.index = 0
        self.moved = False  # whether the user has moved the selection

    @property
    def selected(self) -> Suggestion | None:
        return self.suggestions[self.index] if self.suggestions else None

    def suggest(self, suggestions: Sequence[Suggestion]) -> None:
        if suggestions or self.suggestions:
            self.suggestions, self.index, self.moved = list(suggestions), 0, False
            self.show()

    def move(self, step: int) -> None:
        self.index, self.moved = (self.index + step) % len(self.suggestions), True
        self.show()

    def show(self) -> None:
        self.display = bool(self.suggestions)
        width = max((len(suggestion.text) for suggestion in self.visible_suggestions), default=0)
        lines = []
        for suggestion in self.visible_suggestions:
            is_selected = suggestion is self.selected
            line = one_line(suggestion.text).ljust(min(width, 40))
            if suggestion.description:
                line += f"  {one_line(suggestion.description)}"
            # The mark is for terminals without colours.
            style = "reverse" if is_selected else ""
            lines.append(Text(("> " if is_selected else "  ") + line, style, no_wrap=True))
        self.update(Text("\n", overflow="ellipsis", no_wrap=True).join(lines))

    @property
    def visible_suggestions(self) -> list[Suggestion]:
        """The suggestions in view, with the selected one in the middle if possible."""
        first = max(0, min(self.index - VISIBLE_SUGGESTIONS // 2, len(self.suggestions) - VISIBLE_SUGGESTIONS))
        return self.suggestions[first : first + VISIBLE_SUGGESTIONS]

    def on_click(self, click: Click) -> None:
        click.stop()
        if click.y < len(self.visible_suggestions):
            self.index = self.suggestions.index(self.visible_suggestions[click.y])
            self.post_message(self.Taken())


class Prompt(Vertical):
    """Posts `Sent` for each message and command."""

    class Sent(Message):
        """The user has sent a message, or a command with its slash."""

        def __init__(self, text: str):
            super().__init__()
            self.text = text

    class HelpWanted(Message):
        """The user has typed a question mark into the empty prompt."""

    BINDING_GROUP_TITLE = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+r", "search", "Search history", show=False)]
    DEFAULT_CSS = """
    Prompt {
        height: auto;
        border-top: solid $primary;
        border-title-align: right;
        border-title-color: $text-muted;
    }
    """

    busy = reactive(False)
    """Whether an answer is under way: a message is then sent after its end. Set by the screen."""

    def __init__(self, history_file: Path, commands: Sequence[tuple[str, str]] = ()):
        """commands: names with their slash, and descriptions, for completion"""
        super().__init__(id="prompt")
        self.history = PromptHistory(history_file)
        self.commands = commands
        self.suggestions = Suggestions()
        self.editor = Editor(self, PLACEHOLDER)
        self.is_queued = False
        self.is_editing = False  # an earlier question
        self.text_before_search: str | None = None  # None unless the history is being searched
        self.text_before_history = ""
        self.history_index: int | None = None  # of the entry shown, None for the user's own text
        self.completed_text: str | None = None  # set by the program: offers no completion until it is changed

    def compose(self) -> ComposeResult:
        yield self.suggestions
        yield self.editor

    @property
    def text(self) -> str:
        return self.editor.full_text

    @text.setter
    def text(self, text: str) -> None:
        """Replace the text, for example with a message that got no answer."""
        self.history_index, self.is_editing = None, False
        self._set_editor_text(text)
        self._update_title()

    def edit(self, text: str) -> None:
        """Let the user edit an earlier question."""
        self.text, self.is_editing = text, True
        self._update_title()

    @property
    def selected_text(self) -> str:
        return self.editor.selected_text

    def focus(self, scroll_visible: bool = True) -> "Prompt":
        self.editor.focus(scroll_visible)
        return self

    def watch_busy(self, busy: bool) -> None:
        if self.is_queued and not busy:
            self._send()
        self._update_title()

    # As the editor's host

    def enter(self) -> bool:
        suggestion = self.suggestions.selected
        if suggestion and (
            self.text_before_search is not None or self.suggestions.moved or self._completes_command(suggestion)
        ):
            self._accept(suggestion)
        elif self.text_before_search is not None:
            self.escape()
        elif has_open_quotes(self.text):
            self.editor.insert("\n")
        elif self.busy and self.text.strip():
            self._set_queued(True)
        else:
            self._send()
        return True

    def tab(self) -> bool:
        if suggestion := self.suggestions.selected:
            self._accept(suggestion)
        return suggestion is not None

    def escape(self) -> bool:
        if self.text_before_search is not None:
            text, self.text_before_search = self.text_before_search, None
            self._set_editor_text(text)
        elif self.suggestions.selected:
            self.suggestions.suggest([])
        elif self.is_queued:
            self._set_queued(False)
        else:
            return False
        self._update_title()
        return True

    def up(self, at_edge: bool) -> bool:
        return self._navigate(-1, at_edge)

    def down(self, at_edge: bool) -> bool:
        return self._navigate(1, at_edge)

    def question_mark(self) -> bool:
        if not self.editor.text:
            self.post_message(self.HelpWanted())
        return not self.editor.text

    # History

    def action_search(self) -> None:
        """Search the history; if already searching, go to the next match."""
        if self.text_before_search is None:
            self.text_before_search = self.text
            self._update_title()
            self._suggest_history()
        elif self.suggestions.selected:
            self.suggestions.move(1)

    def _navigate(self, step: int, at_edge: bool) -> bool:
        """Move in the suggestions, or at the edge of the text in the history; return whether either was done."""
        if self.suggestions.selected:
            self.suggestions.move(step)
        elif not at_edge:
            return False
        else:
            self._recall(step)
        return True

    def _recall(self, step: int) -> None:
        entries = self.history.entries
        index = (len(entries) if self.history_index is None else self.history_index) + step
        if index < 0 or (self.history_index is None and step > 0):
            return
        if self.history_index is None:
            self.text_before_history = self.text
        self.history_index = index if index < len(entries) else None
        self._set_editor_text(self.text_before_history if self.history_index is None else entries[index])

    # Completion

    def on_text_area_changed(self, changed: TextArea.Changed) -> None:
        changed.stop()
        if self.is_queued:
            self._set_queued(False)
        if self.text_before_search is not None:
            self._suggest_history()
            return
        self._update_title()
        if self.editor.text == self.completed_text:
            return
        self.completed_text, line = None, self._line_to_cursor
        if line.startswith("/") and "\n" not in self.editor.text:
            self.suggestions.suggest(suggest_commands(line, self.commands))
        elif "@" in line and ends_in_file_reference(line):
            self._suggest_files(line)
        else:
            self.suggestions.suggest([])

    def on_suggestions_taken(self) -> None:
        if suggestion := self.suggestions.selected:
            self._accept(suggestion)
        self.focus()

    @property
    def _line_to_cursor(self) -> str:
        """The current line up to the cursor."""
        row, column = self.editor.cursor_location
        return self.editor.document[row][:column]

    def _completes_command(self, suggestion: Suggestion) -> bool:
        """Return whether the suggestion completes a command that is partly typed, and is not of an earlier text:
        keys that arrive together are all in the text before suggestions follow.
        """
        line = self._line_to_cursor
        return line.startswith("/") and suggestion.text.startswith(line) and suggestion.text != self.editor.text

    @work(exclusive=True)
    async def _suggest_files(self, line: str) -> None:
        """List files on a thread, since the folder may be on a network."""
        files = await asyncio.to_thread(suggest_files, line)
        if line == self._line_to_cursor:
            self.suggestions.suggest(files)

    def _suggest_history(self) -> None:
        matches = self.history.search(self.editor.text)[:MAX_SUGGESTIONS]
        self.suggestions.suggest([Suggestion(text) for text in matches])

    def _accept(self, suggestion: Suggestion) -> None:
        if self.text_before_search is not None:
            self.text_before_search = None
            self._set_editor_text(suggestion.text)
            self._update_title()
            return
        row, column = self.editor.cursor_location
        text = suggestion.text if suggestion.text.endswith("/") else f"{suggestion.text} "
        self.editor.replace(text, (row, suggestion.start_column), (row, column), maintain_selection_offset=False)

    # Sending

    def _send(self) -> None:
        self._set_queued(False)
        text = self.text
        if not text.strip():
            return
        try:
            self.history.add(text)
        except OSError as error:
            reason = one_line(f"the message is not saved in the history: {reason_of(error)}")
            self.notify(reason, severity="warning", markup=False)
        self.text = ""
        self.editor.pastes.clear()
        self.post_message(self.Sent(text))

    def _set_editor_text(self, text: str) -> None:
        self.editor.replace_text(text)
        self.completed_text = self.editor.text
        self.suggestions.suggest([])

    def _set_queued(self, is_queued: bool) -> None:
        self.is_queued = is_queued
        self._update_title()

    def _update_title(self) -> None:
        titles = (
            (self.is_queued, QUEUED_TITLE),
            (self.text_before_search is not None, SEARCHING_TITLE),
            (has_open_quotes(self.text), OPEN_QUOTES_TITLE),
            (self.is_editing, EDITING_TITLE),
            (self.busy, BUSY_TITLE),
        )
        self.border_title = next((title for applies, title in titles if applies), "")


def suggest_commands(line: str, commands: Sequence[tuple[str, str]]) -> list[Suggestion]:
    """Return the commands that begin with `line`, the text up to the cursor; none after a space."""
    if not COMMAND_PATTERN.fullmatch(line):
        return []
    return [Suggestion(name, about) for name, about in commands if name.startswith(line)]


def ends_in_file_reference(line: str) -> bool:
    """Return whether `line`, the text up to the cursor, ends in a possible file reference."""
    return FILE_PATTERN.search(line) is not None


def suggest_files(line: str) -> list[Suggestion]:
    """Return completions of the file reference at the end of `line`, folders first; empty if there is none.

    Hidden files are included only after a dot.
    """
    if not (match := FILE_PATTERN.search(line)):
        return []
    word = match["bare"] if match["quoted"] is None else match["quoted"]
    folder, prefix = os.path.split(word)
    folders, files = [], []
    with suppress(OSError, RuntimeError), os.scandir(Path(folder or ".").expanduser()) as entries:
        for entry, _ in zip(entries, range(MAX_SCANNED_FILES), strict=False):
            if entry.name.startswith(prefix) and entry.name.startswith(".") == prefix.startswith("."):
                path = os.path.join(folder, entry.name)
                (folders if entry.is_dir() else files).append(path)
    references = [(_open_folder_reference(path), "folder") for path in sorted(folders)]
    references += [(file_reference(path), "") for path in sorted(files)]
    return [Suggestion(text, kind, match.start()) for text, kind in references[:MAX_SUGGESTIONS]]


def _open_folder_reference(folder: str) -> str:
    """Return a reference whose quote is still open, since the name of a file follows."""
    return f'@"{folder}/' if re.search(r"\s", folder) else f"@{folder}/"


class PromptHistory:
    """Earlier messages, shared with the line editor of `--plain`.

    The format of the file is prompt_toolkit's, which would take 0.1 s to import: a comment with the time, then
    each line of a message after a plus sign.
    """

    def __init__(self, file: Path):
        self.file = file
        self.cached_entries: list[str] | None = None

    @property
    def entries(self) -> list[str]:
        """All messages, oldest first."""
        if self.cached_entries is None:
            self.cached_entries = read_history(self.file)
        return self.cached_entries

    def add(self, text: str) -> None:
        """Append a message, unless it repeats the last one. Raises OSError if the file cannot be written."""
        if self.entries[-1:] == [text]:
            return
        self.entries.append(text)
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = "".join(f"+{line}\n" for line in text.split("\n"))
        entry = f"\n# {datetime.now()}\n{lines}".encode(errors="replace")
        # In one write, since other processes may append at the same time.
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, entry)
        finally:
            os.close(descriptor)

    def search(self, words: str) -> list[str]:
        """Return messages that contain every word, newest first, without repetitions."""
        lowered = words.lower().split()
        return [text for text in dict.fromkeys(reversed(self.entries)) if all(w in text.lower() for w in lowered)]


def read_history(file: Path) -> list[str]:
    """Return the messages in a file, oldest first; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - MAX_READ_BYTES))
            content = opened.read(MAX_READ_BYTES)
    except OSError:
        return []
    if len(content) == MAX_READ_BYTES:  # the first entry is incomplete
        content = content[content.find(b"\n#") + 1 :]
    entries: list[str] = []
    lines: list[str] = []
    for line in [*content.decode(errors="replace").split("\n"), ""]:
        if line.startswith("+"):
            lines.append(line[1:])
        elif lines:
            entries.append("\n".join(lines))
            lines = []
    return entries

"""Where a person writes to the model: a text of several lines, what was written before, and what may be completed.

It knows no model. What it cannot decide alone it leaves to the screen: Ctrl-C, Ctrl-D on an empty line, Ctrl-Z,
Tab, Escape and the page keys reach that where there is nothing to be done about them here.
"""

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import TextArea

from localllm.files import reason_of
from localllm.formatting import one_line
from localllm.tui.editor import Editor
from localllm.tui.offers import Suggestion, Suggestions, ends_in_file_reference, suggest_commands, suggest_files

# What was written before, in the file of the plain line editor, whose format is that of prompt_toolkit: a
# comment with the time, then each line of a message after a plus sign. That library would take 0.1 s to import.
MAX_READ_BYTES = 2**20  # from the end of the file: thousands of messages


class PromptHistory:
    """`entries` are the messages, oldest first: those of the file when they are first wanted, and those since."""

    def __init__(self, file: Path):
        self.file = file
        self.cached_entries: list[str] | None = None

    @property
    def entries(self) -> list[str]:
        if self.cached_entries is None:
            self.cached_entries = read_history(self.file)
        return self.cached_entries

    def add(self, text: str) -> None:
        """Unless it is the same as the last one. Raises OSError where the file cannot be written."""
        if self.entries[-1:] == [text]:
            return
        self.entries.append(text)
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = "".join(f"+{line}\n" for line in text.split("\n"))
        entry = f"\n# {datetime.now()}\n{lines}".encode(errors="replace")
        # In one piece: others may append to it at the same time.
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, entry)
        finally:
            os.close(descriptor)

    def search(self, words: str) -> list[str]:
        """Messages that have every word, newest first, each once."""
        wanted = words.lower().split()
        return [text for text in dict.fromkeys(reversed(self.entries)) if all(w in text.lower() for w in wanted)]


def read_history(file: Path) -> list[str]:
    """Oldest first; nothing where there is no file that can be read."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - MAX_READ_BYTES))
            content = opened.read(MAX_READ_BYTES)
    except OSError:
        return []
    if len(content) == MAX_READ_BYTES:  # the first is cut
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


PLACEHOLDER = "Say something, or ? for help"
QUEUED_TITLE = " sent when the answer is there; Esc takes it back "
BUSY_TITLE = " Esc stops the answer "
EDITING_TITLE = " Enter asks this instead, on a branch of its own; Esc leaves it as it was "
SEARCHING_TITLE = " what was written before: type words, Enter takes one, Esc leaves "


class Prompt(Vertical):
    """commands: names with their slash and what they do, as they are completed."""

    class Sent(Message):
        """A message, or a command with its slash."""

        def __init__(self, text: str):
            super().__init__()
            self.text = text

    class HelpWanted(Message):
        """By a question mark in the empty prompt."""

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
    """An answer is under way: what is sent meanwhile waits for its end. Set by the screen."""

    def __init__(self, history_file: Path, commands: Sequence[tuple[str, str]] = ()):
        super().__init__(id="prompt")
        self.history = PromptHistory(history_file)
        self.commands = commands
        self.suggestions = Suggestions()
        self.editor = Editor(self, PLACEHOLDER)
        self.is_queued = False
        self.is_editing = False  # what stands here was asked before, and is asked otherwise
        self.text_before_search: str | None = None  # what stood here before the history was searched, while it is
        self.history_index: int | None = None  # in the history
        self.completed_text: str | None = (
            None  # what was put here, until it is changed: there is nothing to complete
        )
        self.text_before_history = ""  # what stood here before an earlier message was looked at

    def compose(self) -> ComposeResult:
        yield self.suggestions
        yield self.editor

    @property
    def text(self) -> str:
        return self.editor.full_text

    @text.setter
    def text(self, text: str) -> None:
        """Such as a message that could not be answered."""
        self.history_index, self.is_editing = None, False
        self._set_editor_text(text)
        self._update_title()

    def edit(self, text: str) -> None:
        """A message that is asked otherwise, until another text stands here."""
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

    # What the editor asks

    def enter(self) -> bool:
        offer = self.suggestions.selected
        if offer and (
            self.text_before_search is not None
            or self.suggestions.moved
            or _completes_command(offer, self.editor.text)
        ):
            self._accept(offer)
        elif self.text_before_search is not None:
            self.escape()
        elif self.busy and self.text.strip():
            self._set_queued(True)
        else:
            self._send()
        return True

    def tab(self) -> bool:
        if offer := self.suggestions.selected:
            self._accept(offer)
        return offer is not None

    def escape(self) -> bool:
        if self.text_before_search is not None:
            before, self.text_before_search = self.text_before_search, None
            self._set_editor_text(before)
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
        """Ctrl-R; once more goes on to the next one."""
        if self.text_before_search is None:
            self.text_before_search = self.text
            self._update_title()
            self._suggest_history()
        elif self.suggestions.selected:
            self.suggestions.move(1)

    def _navigate(self, step: int, at_edge: bool) -> bool:
        """Through what is offered, else through the history."""
        if self.suggestions.selected:
            self.suggestions.move(step)
        elif not at_edge:
            return False
        else:
            self._recall(step)
        return True

    def _recall(self, step: int) -> None:
        entries = self.history.entries
        place = (len(entries) if self.history_index is None else self.history_index) + step
        if place < 0 or (self.history_index is None and step > 0):
            return
        if self.history_index is None:
            self.text_before_history = self.text
        self.history_index = place if place < len(entries) else None
        self._set_editor_text(self.text_before_history if self.history_index is None else entries[place])

    # What is offered

    def on_text_area_changed(self, changed: TextArea.Changed) -> None:
        changed.stop()
        if self.is_queued:
            self._set_queued(False)
        if self.text_before_search is not None:
            self._suggest_history()
            return
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
        if offer := self.suggestions.selected:
            self._accept(offer)
        self.focus()

    @property
    def _line_to_cursor(self) -> str:
        """Up to the cursor."""
        row, column = self.editor.cursor_location
        return self.editor.document[row][:column]

    @work(exclusive=True)
    async def _suggest_files(self, line: str) -> None:
        """From a thread, as a folder may lie far away."""
        found = await asyncio.to_thread(suggest_files, line)
        if line == self._line_to_cursor:
            self.suggestions.suggest(found)

    def _suggest_history(self) -> None:
        self.suggestions.suggest([Suggestion(text) for text in self.history.search(self.editor.text)[:200]])

    def _accept(self, offer: Suggestion) -> None:
        if self.text_before_search is not None:
            self.text_before_search = None
            self._set_editor_text(offer.text)
            self._update_title()
            return
        row, column = self.editor.cursor_location
        rest = "" if offer.text.endswith("/") else " "
        self.editor.replace(
            offer.text + rest, (row, offer.start_column), (row, column), maintain_selection_offset=False
        )

    # Sending

    def _send(self) -> None:
        self._set_queued(False)
        text = self.text
        if not text.strip():
            return
        try:
            self.history.add(text)
        except OSError as error:
            why = one_line(f"this is kept in no history: {reason_of(error)}")
            self.notify(why, severity="warning", markup=False)
        self.text = ""
        self.editor.pastes.clear()
        self.post_message(self.Sent(text))

    def _set_editor_text(self, text: str) -> None:
        self.editor.replace_text(text)
        self.completed_text = self.editor.text
        self.suggestions.suggest([])

    def _set_queued(self, waits: bool) -> None:
        self.is_queued = waits
        self._update_title()

    def _update_title(self) -> None:
        told = (
            (self.is_queued, QUEUED_TITLE),
            (self.text_before_search is not None, SEARCHING_TITLE),
            (self.is_editing, EDITING_TITLE),
            (self.busy, BUSY_TITLE),
        )
        self.border_title = next((words for holds, words in told if holds), "")


def _completes_command(offer: Suggestion, text: str) -> bool:
    """Is it a command that was begun, and no other word?"""
    return text.startswith("/") and offer.text != text

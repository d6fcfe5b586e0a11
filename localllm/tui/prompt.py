"""Where a person writes to the model: a text of several lines, what was written before, and what may be completed.

It knows no model. What it cannot decide alone it leaves to the screen: Ctrl-C, Ctrl-D on an empty line, Ctrl-Z,
Tab, Escape and the page keys reach that where there is nothing to be done about them here.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import TextArea

from localllm.tui.editor import Editor
from localllm.tui.history import History
from localllm.tui.offers import Offer, Offers, commands_for, files_for, names_file
from localllm.visible import one_line

PLACEHOLDER = "Say something, or ? for help"
WAITS = " sent when the answer is there; Esc takes it back "
STOPS = " Esc stops the answer "
EDITS = " Enter asks this instead, on a branch of its own; Esc leaves it as it was "
SEARCHES = " what was written before: type words, Enter takes one, Esc leaves "


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
        self.history = History(history_file)
        self.commands = commands
        self.offers = Offers()
        self.editor = Editor(self, PLACEHOLDER)
        self.waits = False
        self.edits = False  # what stands here was asked before, and is asked otherwise
        self.searched: str | None = None  # what stood here before the history was searched, while it is
        self.place: int | None = None  # in the history
        self.shown: str | None = None  # what was put here, until it is changed: there is nothing to complete
        self.draft = ""  # what stood here before an earlier message was looked at

    def compose(self) -> ComposeResult:
        yield self.offers
        yield self.editor

    @property
    def text(self) -> str:
        return self.editor.whole

    @text.setter
    def text(self, text: str) -> None:
        """Such as a message that could not be answered."""
        self.place, self.edits = None, False
        self._put(text)
        self._tell()

    def edit(self, text: str) -> None:
        """A message that is asked otherwise, until another text stands here."""
        self.text, self.edits = text, True
        self._tell()

    @property
    def selected_text(self) -> str:
        return self.editor.selected_text

    def focus(self, scroll_visible: bool = True) -> "Prompt":
        self.editor.focus(scroll_visible)
        return self

    def watch_busy(self, busy: bool) -> None:
        if self.waits and not busy:
            self._send()
        self._tell()

    # What the editor asks

    def enter(self) -> bool:
        offer = self.offers.chosen
        if offer and (self.searched is not None or self.offers.moved or _completes(offer, self.editor.text)):
            self._take(offer)
        elif self.searched is not None:
            self.escape()
        elif self.busy and self.text.strip():
            self._wait(True)
        else:
            self._send()
        return True

    def tab(self) -> bool:
        if offer := self.offers.chosen:
            self._take(offer)
        return offer is not None

    def escape(self) -> bool:
        if self.searched is not None:
            before, self.searched = self.searched, None
            self._put(before)
        elif self.offers.chosen:
            self.offers.offer([])
        elif self.waits:
            self._wait(False)
        else:
            return False
        self._tell()
        return True

    def up(self, at_edge: bool) -> bool:
        return self._move(-1, at_edge)

    def down(self, at_edge: bool) -> bool:
        return self._move(1, at_edge)

    def question_mark(self) -> bool:
        if not self.editor.text:
            self.post_message(self.HelpWanted())
        return not self.editor.text

    # History

    def action_search(self) -> None:
        """Ctrl-R; once more goes on to the next one."""
        if self.searched is None:
            self.searched = self.text
            self._tell()
            self._offer_history()
        elif self.offers.chosen:
            self.offers.move(1)

    def _move(self, step: int, at_edge: bool) -> bool:
        """Through what is offered, else through the history."""
        if self.offers.chosen:
            self.offers.move(step)
        elif not at_edge:
            return False
        else:
            self._recall(step)
        return True

    def _recall(self, step: int) -> None:
        entries = self.history.entries
        place = (len(entries) if self.place is None else self.place) + step
        if place < 0 or (self.place is None and step > 0):
            return
        if self.place is None:
            self.draft = self.text
        self.place = place if place < len(entries) else None
        self._put(self.draft if self.place is None else entries[place])

    # What is offered

    def on_text_area_changed(self, changed: TextArea.Changed) -> None:
        changed.stop()
        if self.waits:
            self._wait(False)
        if self.searched is not None:
            self._offer_history()
            return
        if self.editor.text == self.shown:
            return
        self.shown, line = None, self._line
        if line.startswith("/") and "\n" not in self.editor.text:
            self.offers.offer(commands_for(line, self.commands))
        elif "@" in line and names_file(line):
            self._offer_files(line)
        else:
            self.offers.offer([])

    def on_offers_taken(self) -> None:
        if offer := self.offers.chosen:
            self._take(offer)
        self.focus()

    @property
    def _line(self) -> str:
        """Up to the cursor."""
        row, column = self.editor.cursor_location
        return self.editor.document[row][:column]

    @work(exclusive=True)
    async def _offer_files(self, line: str) -> None:
        """From a thread, as a folder may lie far away."""
        found = await asyncio.to_thread(files_for, line)
        if line == self._line:
            self.offers.offer(found)

    def _offer_history(self) -> None:
        self.offers.offer([Offer(text) for text in self.history.search(self.editor.text)[:200]])

    def _take(self, offer: Offer) -> None:
        if self.searched is not None:
            self.searched = None
            self._put(offer.text)
            self._tell()
            return
        row, column = self.editor.cursor_location
        rest = "" if offer.text.endswith("/") else " "
        self.editor.replace(offer.text + rest, (row, offer.begin), (row, column), maintain_selection_offset=False)

    # Sending

    def _send(self) -> None:
        self._wait(False)
        text = self.text
        if not text.strip():
            return
        try:
            self.history.add(text)
        except OSError as error:
            self.notify(one_line(f"this is kept in no history: {error}"), severity="warning", markup=False)
        self.text = ""
        self.editor.pastes.clear()
        self.post_message(self.Sent(text))

    def _put(self, text: str) -> None:
        self.editor.put(text)
        self.shown = self.editor.text
        self.offers.offer([])

    def _wait(self, waits: bool) -> None:
        self.waits = waits
        self._tell()

    def _tell(self) -> None:
        told = (
            (self.waits, WAITS),
            (self.searched is not None, SEARCHES),
            (self.edits, EDITS),
            (self.busy, STOPS),
        )
        self.border_title = next((words for holds, words in told if holds), "")


def _completes(offer: Offer, text: str) -> bool:
    """Is it a command that was begun, and no other word?"""
    return text.startswith("/") and offer.text != text

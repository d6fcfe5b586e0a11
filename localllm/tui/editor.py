"""The text of the prompt: keys as shells have them, and pastes of any size, which stand folded while they are
written about. What Enter, the arrows and Escape do at its edges, the prompt around it says.
"""

import re
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, cast

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.actions import SkipAction
from textual.binding import Binding, BindingType
from textual.events import Key, Paste
from textual.widgets import TextArea
from textual.widgets.text_area import Location

from localllm.conversation.attach import dropped_file_references
from localllm.formatting import printable

# What terminals without a protocol for keys send for Alt+Enter, and Textual reads as Enter alone.
cast(dict[str, Any], ANSI_SEQUENCES_KEYS)["\x1b\r"] = (SimpleNamespace(value="alt+enter"),)

FOLDED_PASTE = re.compile(r"\[paste (\d+): [\d,]+ (?:lines|characters)\]")
MAX_PASTE_LINES, MAX_PASTE_CHARACTERS = 30, 3000  # of a paste that is shown as it is
NEW_LINE_KEYS = ("shift+enter", "alt+enter", "ctrl+j")


class EditorHost(Protocol):
    """What the editor asks the prompt. Each says whether it has done something about it."""

    def enter(self) -> bool: ...
    def up(self, at_edge: bool) -> bool: ...
    def down(self, at_edge: bool) -> bool: ...
    def tab(self) -> bool: ...
    def escape(self) -> bool: ...
    def question_mark(self) -> bool: ...


class Editor(TextArea):
    BINDING_GROUP_TITLE = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+underscore,ctrl+minus", "undo", show=False),
        Binding("ctrl+b", "cursor_left", show=False),
        Binding("ctrl+f", "cursor_right", show=False),
        Binding("alt+d", "delete_word_right", show=False),
        Binding("ctrl+d", "delete_or_leave", show=False),
        Binding("ctrl+z,f6,f7", "leave_to_the_screen", show=False),
    ]
    DEFAULT_CSS = """
    Editor, Editor:focus {
        height: auto;
        max-height: 8;
        border: none;
        padding: 0 1;
        background: $background;
        scrollbar-size-vertical: 1;
    }
    """

    def __init__(self, around: EditorHost, placeholder: str):
        super().__init__(compact=True, highlight_cursor_line=False, placeholder=placeholder)
        self.host = around
        self.pastes: dict[str, str] = {}  # what stands folded, by its number

    @property
    def full_text(self) -> str:
        """The text with all that stands folded in it."""
        return FOLDED_PASTE.sub(lambda found: self.pastes.get(found[1], found[0]), self.text)

    def replace_text(self, text: str) -> None:
        """In place of what is there."""
        self.load_text(self.fold_paste(text))
        self.move_cursor(self.document.end)

    def fold_paste(self, text: str) -> str:
        """What is shown of it: itself, unless it is too long to be looked at here."""
        lines = len(text.removesuffix("\n").split("\n"))
        if lines <= MAX_PASTE_LINES and len(text) <= MAX_PASTE_CHARACTERS:
            return printable(text)
        number = str(len(self.pastes) + 1)
        self.pastes[number] = text
        size = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        return f"[paste {number}: {size}]"

    async def _on_key(self, event: Key) -> None:
        asked = {
            "enter": self.host.enter,
            "tab": self.host.tab,
            "escape": self.host.escape,
            "question_mark": self.host.question_mark,
        }.get(event.key)
        if event.key in NEW_LINE_KEYS:
            self.insert("\n")
        elif not (asked and asked()) and not await self._run_bound_action(event.key):
            return
        event.stop()
        event.prevent_default()

    async def _run_bound_action(self, key: str) -> bool:
        """What the key is bound to here, at once. Textual does it when the key has come up to the screen, and
        letters that came together with it, as in a slow terminal, would stand in the text before."""
        bound = self._bindings.key_to_bindings.get(key, ())
        return any([await self.app.run_action(binding.action, self) for binding in bound])

    async def _on_paste(self, event: Paste) -> None:
        event.stop()
        event.prevent_default()  # it would be put in once more
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        self.replace(
            dropped_file_references(text) or self.fold_paste(text),
            *self.selection,
            maintain_selection_offset=False,
        )

    def action_cursor_up(self, select: bool = False) -> None:
        at_edge = self.navigator.is_first_wrapped_line(self.cursor_location)
        if select or not self.host.up(at_edge):
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        at_edge = self.navigator.is_last_wrapped_line(self.cursor_location)
        if select or not self.host.down(at_edge):
            super().action_cursor_down(select)

    def action_delete_left(self) -> None:
        if folded := self._paste_at_cursor(ends=True):
            self.delete(*folded)
        else:
            super().action_delete_left()

    def action_delete_right(self) -> None:
        if folded := self._paste_at_cursor(ends=False):
            self.delete(*folded)
        else:
            super().action_delete_right()

    def action_delete_or_leave(self) -> None:
        """Ctrl-D, which on an empty line is the screen's."""
        if not self.text:
            raise SkipAction
        self.action_delete_right()

    def action_leave_to_the_screen(self) -> None:
        raise SkipAction

    def action_cursor_page_up(self) -> None:
        self._skip_if_fully_visible()
        super().action_cursor_page_up()

    def action_cursor_page_down(self) -> None:
        self._skip_if_fully_visible()
        super().action_cursor_page_down()

    def _skip_if_fully_visible(self) -> None:
        """Of a text that is seen as a whole: then the screen's are meant."""
        if self.wrapped_document.height <= self.size.height:
            raise SkipAction

    def _paste_at_cursor(self, *, ends: bool) -> tuple[Location, Location] | None:
        """The paste that ends, or begins, at the cursor: it goes whole, as half of its name stands for nothing."""
        row, column = self.cursor_location
        if self.selection.is_empty:
            for found in FOLDED_PASTE.finditer(self.document[row]):
                if found[1] in self.pastes and column == (found.end() if ends else found.start()):
                    return (row, found.start()), (row, found.end())
        return None

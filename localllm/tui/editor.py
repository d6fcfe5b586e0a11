"""The text editor in the prompt, with the keys of shells and long pastes folded to a placeholder.

Its `EditorHost` decides about Enter, Tab, Escape, and the arrows at the edges.
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

# Terminals without a key protocol send this for Alt+Enter, and Textual reads it as Enter.
cast(dict[str, Any], ANSI_SEQUENCES_KEYS)["\x1b\r"] = (SimpleNamespace(value="alt+enter"),)

FOLDED_PASTE = re.compile(r"\[paste (\d+): [\d,]+ (?:lines|characters)\]")
MAX_PASTE_LINES, MAX_PASTE_CHARACTERS = 30, 3000  # longer pastes are folded
NEW_LINE_KEYS = ("shift+enter", "alt+enter", "ctrl+j")


class EditorHost(Protocol):
    """The editor's parent. Each method returns whether it has handled the key."""

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

    def __init__(self, host: EditorHost, placeholder: str):
        super().__init__(compact=True, highlight_cursor_line=False, placeholder=placeholder)
        self.host = host
        self.pastes: dict[str, str] = {}  # folded ones, by number

    @property
    def full_text(self) -> str:
        """The text with folded pastes expanded."""
        return FOLDED_PASTE.sub(lambda match: self.pastes.get(match[1], match[0]), self.text)

    def replace_text(self, text: str) -> None:
        """Replace everything, folding a long text."""
        self.load_text(self.fold_paste(text))
        self.move_cursor(self.document.end)

    def fold_paste(self, text: str) -> str:
        """Return a placeholder for a long text, otherwise the text itself."""
        size = folded_size(text)
        if not size:
            return printable(text)
        number = str(len(self.pastes) + 1)
        self.pastes[number] = text
        return f"[paste {number}: {size}]"

    async def _on_key(self, event: Key) -> None:
        handler = {
            "enter": self.host.enter,
            "tab": self.host.tab,
            "escape": self.host.escape,
            "question_mark": self.host.question_mark,
        }.get(event.key)
        if event.key in NEW_LINE_KEYS:
            self.insert("\n")
        elif not (handler and handler()) and not await self._run_bound_action(event.key):
            return
        event.stop()
        event.prevent_default()

    async def _run_bound_action(self, key: str) -> bool:
        """Run the actions bound to a key immediately; return whether there are any.

        Textual would run them after the key has bubbled up to the screen, so that letters that arrive together
        with it, as from a slow terminal, would be inserted before.
        """
        bindings = self._bindings.key_to_bindings.get(key, ())
        return any([await self.app.run_action(binding.action, self) for binding in bindings])

    async def _on_paste(self, event: Paste) -> None:
        event.stop()
        event.prevent_default()  # TextArea would insert it as well
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
        if paste := self._paste_at_cursor(ends=True):
            self.delete(*paste)
        else:
            super().action_delete_left()

    def action_delete_right(self) -> None:
        if paste := self._paste_at_cursor(ends=False):
            self.delete(*paste)
        else:
            super().action_delete_right()

    def action_delete_or_leave(self) -> None:
        """Delete to the right; on an empty prompt, leave Ctrl-D to the screen."""
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
        """Leave page keys to the screen if the whole text is visible."""
        if self.wrapped_document.height <= self.size.height:
            raise SkipAction

    def _paste_at_cursor(self, *, ends: bool) -> tuple[Location, Location] | None:
        """Return the range of the folded paste that ends, or begins, at the cursor; it is deleted as a whole."""
        row, column = self.cursor_location
        if self.selection.is_empty:
            for match in FOLDED_PASTE.finditer(self.document[row]):
                if match[1] in self.pastes and column == (match.end() if ends else match.start()):
                    return (row, match.start()), (row, match.end())
        return None


def folded_size(text: str) -> str:
    """Return the size of a text that is too long to show, in lines or characters; "" for a shorter one."""
    line_count = len(text.removesuffix("\n").split("\n"))
    if line_count <= MAX_PASTE_LINES and len(text) <= MAX_PASTE_CHARACTERS:
        return ""
    return f"{line_count:,} lines" if line_count > 1 else f"{len(text):,} characters"

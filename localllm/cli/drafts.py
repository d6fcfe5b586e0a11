"""What `--draft` shows of guesses: a line below the answer while it comes, gone at its end, and one line then.

Terminals differ in where the cursor is kept behind a character in the last column, and some would write the next
one over it: so nothing is shown while an answer has just filled a line.
"""

import os
import sys
from contextlib import suppress

from localllm.cli.io import note, supports_redraw
from localllm.request import EventType, GenerationEvent

# Down a line and up again, in the same column, so that there is one below; the cursor kept; that line, emptied.
CLEAR_LINE_BELOW, RESTORE_CURSOR = "\x1bD\x1bM\x1b7\x1b[1E\x1b[2K", "\x1b8"


class DraftStatusLine:
    def __init__(self) -> None:
        self.redraws = supports_redraw(sys.stderr)
        self.draft_tokens = self.accepted_tokens = self.tokens = 0
        self.shown = False
        self.width = os.get_terminal_size(sys.stderr.fileno()).columns if self.redraws else 0
        self.column = 0  # that the answer's next character comes to; the width: its last one filled the line
        self.event_type = EventType.CONTENT

    def add_event(self, event: GenerationEvent) -> None:
        self.tokens += len(event.token_ids)
        self.draft_tokens += event.drafted
        self.accepted_tokens += event.accepted
        if self.redraws:
            if event.kind is not self.event_type or event.tool_call:
                self.column = 0  # thoughts and calls end their lines
            self.event_type = event.kind
            self.column = cursor_column_after(event.text, self.column, self.width)

    def show(self) -> None:
        if self.redraws and self.column < self.width:
            self._put(f"{CLEAR_LINE_BELOW}{self.text()}{RESTORE_CURSOR}")
            self.shown = True

    def hide(self) -> None:
        """Before anything else is written."""
        if self.shown:
            self._put(CLEAR_LINE_BELOW + RESTORE_CURSOR)
            self.shown = False

    def finish(self) -> None:
        self.hide()
        note(self.text())

    def text(self) -> str:
        steps = self.tokens - self.accepted_tokens
        each = f"{self.tokens / steps:.2f}" if steps else "no"
        return f"draft: {self.draft_tokens} drafted, {self.accepted_tokens} accepted, {each} tokens/step"

    def _put(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def cursor_column_after(text: str, column: int, width: int) -> int:
    """Where the cursor of a terminal of so many columns stands behind a text that begins at `column`."""
    from rich.cells import get_character_cell_size  # a pipe need not wait for it

    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min(column // 8 * 8 + 8, width - 1)
        else:
            cells = get_character_cell_size(character)
            column = cells if cells and column + cells > width else column + cells
    return column

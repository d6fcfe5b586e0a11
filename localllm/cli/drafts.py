"""What `--draft` shows of guesses: a line below the answer while it comes, gone at its end, and one line then.

Terminals differ in where the cursor is kept behind a character in the last column, and some would write the next
one over it: so nothing is shown while an answer has just filled a line.
"""

import os
import sys
from contextlib import suppress

from localllm.cli.io import is_live, note
from localllm.request import GenerationEvent, Kind

# Down a line and up again, in the same column, so that there is one below; the cursor kept; that line, emptied.
BELOW, BACK = "\x1bD\x1bM\x1b7\x1b[1E\x1b[2K", "\x1b8"


class DraftLine:
    def __init__(self) -> None:
        self.live = is_live(sys.stderr)
        self.drafted = self.accepted = self.tokens = 0
        self.shown = False
        self.width = os.get_terminal_size(sys.stderr.fileno()).columns if self.live else 0
        self.column = 0  # that the answer's next character comes to; the width: its last one filled the line
        self.kind = Kind.CONTENT

    def count(self, event: GenerationEvent) -> None:
        self.tokens += len(event.token_ids)
        self.drafted += event.drafted
        self.accepted += event.accepted
        if self.live:
            if event.kind is not self.kind or event.tool_call:
                self.column = 0  # thoughts and calls end their lines
            self.kind = event.kind
            self.column = column_after(event.text, self.column, self.width)

    def show(self) -> None:
        if self.live and self.column < self.width:
            self._put(f"{BELOW}{self.text()}{BACK}")
            self.shown = True

    def hide(self) -> None:
        """Before anything else is written."""
        if self.shown:
            self._put(BELOW + BACK)
            self.shown = False

    def finish(self) -> None:
        self.hide()
        note(self.text())

    def text(self) -> str:
        steps = self.tokens - self.accepted
        each = f"{self.tokens / steps:.2f}" if steps else "no"
        return f"draft: {self.drafted} drafted, {self.accepted} accepted, {each} tokens/step"

    def _put(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def column_after(text: str, column: int, width: int) -> int:
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

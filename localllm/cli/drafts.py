"""What `--draft` shows of guesses: a line below the answer while it comes, gone at its end, and one line then."""

import os
import sys
from contextlib import suppress

from localllm.cli.io import is_terminal, note
from localllm.request import GenerationEvent

# Down a line and up again, in the same column, so that there is one below; the cursor kept; that line, emptied.
BELOW, BACK = "\x1bD\x1bM\x1b7\x1b[1E\x1b[2K", "\x1b8"


class DraftLine:
    def __init__(self) -> None:
        self.live = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self.drafted = self.accepted = self.tokens = 0
        self.shown = False

    def count(self, event: GenerationEvent) -> None:
        self.tokens += len(event.token_ids)
        self.drafted += event.drafted
        self.accepted += event.accepted

    def show(self) -> None:
        if self.live:
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

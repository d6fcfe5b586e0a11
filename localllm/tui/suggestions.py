"""Completion in the prompt: commands after `/`, files after `@`, and earlier messages."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from textual.events import Click
from textual.message import Message
from textual.widgets import Static

from localllm.conversation.attach import file_reference
from localllm.formatting import one_line

COMMAND_PATTERN = re.compile(r"/\S*")
FILE_PATTERN = re.compile(r"""(?:^|(?<=\s))@(?:"(?P<quoted>[^"]*)|(?P<bare>[^\s"']*))$""")
MAX_SCANNED_FILES = 2000  # of a folder
MAX_SUGGESTIONS = 200
VISIBLE_ROWS = 6


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
        first = max(0, min(self.index - VISIBLE_ROWS // 2, len(self.suggestions) - VISIBLE_ROWS))
        return self.suggestions[first : first + VISIBLE_ROWS]

    def on_click(self, click: Click) -> None:
        click.stop()
        if click.y < len(self.visible_suggestions):
            self.index = self.suggestions.index(self.visible_suggestions[click.y])
            self.post_message(self.Taken())


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

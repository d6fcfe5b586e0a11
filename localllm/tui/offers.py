"""What may stand at the cursor of the prompt: a command after `/`, a file after `@`, a message written before."""

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
from localllm.formatting import format_bytes, one_line
from localllm.tui.machine import ModelOffer


# What is said of an offered model in a line. Only what is known; knows no screen.
def memory_and_speed(offer: ModelOffer) -> str:
    """`fits: 5.2 of 23.5 GB; about 118 tokens/s`, or what of it is known."""
    said = ""
    if offer.needs_bytes is not None and offer.free_bytes is not None:
        needs, free = format_bytes(offer.needs_bytes), format_bytes(offer.free_bytes)
        said = f"fits: {needs} of {free}" if offer.fits else f"does not fit: {needs} needed, {free} are free"
    speed = f"about {approximate_rate(offer.tokens_per_s)}" if offer.tokens_per_s else ""
    return f"{said}; {speed}" if said and speed else said or speed


def approximate_rate(tokens_per_s: float) -> str:
    """Of a guess: no digits that nobody knows."""
    return f"{tokens_per_s:.0f} tokens/s" if tokens_per_s >= 2 else f"{tokens_per_s:.1f} tokens/s"


def parameters_and_license(offer: ModelOffer) -> str:
    """`4.02B parameters · apache-2.0`."""
    licence = one_line(offer.license) if offer.license else "licence not known"
    return f"{offer.parameters} parameters · {licence}" if offer.parameters != "-" else licence


COMMAND_PATTERN = re.compile(r"/\S*")
FILE_PATTERN = re.compile(r"""(?:^|(?<=\s))@(?:"(?P<quoted>[^"]*)|(?P<bare>[^\s"']*))$""")
MAX_SCANNED_FILES = 2000  # of a folder are looked at
MAX_SUGGESTIONS = 200
VISIBLE_ROWS = 6


@dataclass(frozen=True)
class Suggestion:
    text: str  # what is put in
    description: str = ""
    start_column: int = 0  # of what it takes the place of: the column, on the line of the cursor


def suggest_commands(line: str, commands: Sequence[tuple[str, str]]) -> list[Suggestion]:
    """line: up to the cursor. Nothing where it is no command, or one and its words."""
    if not COMMAND_PATTERN.fullmatch(line):
        return []
    return [Suggestion(name, about) for name, about in commands if name.startswith(line)]


def ends_in_file_reference(line: str) -> bool:
    """Does the line, up to the cursor, end in what may name a file?"""
    return FILE_PATTERN.search(line) is not None


def suggest_files(line: str) -> list[Suggestion]:
    """line: up to the cursor. Folders first; those that begin with a dot only where that was written."""
    if not (found := FILE_PATTERN.search(line)):
        return []
    word = found["bare"] if found["quoted"] is None else found["quoted"]
    folder, begin = os.path.split(word)
    folders, files = [], []
    with suppress(OSError, RuntimeError), os.scandir(Path(folder or ".").expanduser()) as entries:
        for entry, _ in zip(entries, range(MAX_SCANNED_FILES), strict=False):
            if entry.name.startswith(begin) and entry.name.startswith(".") == begin.startswith("."):
                path = os.path.join(folder, entry.name)
                (folders if entry.is_dir() else files).append(path)
    named = [(_open_folder_reference(path), "folder") for path in sorted(folders)] + [
        (file_reference(p), "") for p in sorted(files)
    ]
    return [Suggestion(text, about, found.start()) for text, about in named[:MAX_SUGGESTIONS]]


def _open_folder_reference(folder: str) -> str:
    """A quote is left open, as a file in the folder follows."""
    return f'@"{folder}/' if re.search(r"\s", folder) else f"@{folder}/"


class Suggestions(Static):
    """A list of a few lines, one of which is chosen. It is not there while there is nothing to offer."""

    DEFAULT_CSS = """
    Suggestions { display: none; height: auto; padding: 0 1; background: $panel; }
    """

    class Taken(Message):
        """One was clicked."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.suggestions: list[Suggestion] = []
        self.index = 0
        self.moved = False  # since they were offered

    @property
    def selected(self) -> Suggestion | None:
        return self.suggestions[self.index] if self.suggestions else None

    def suggest(self, offers: Sequence[Suggestion]) -> None:
        if offers or self.suggestions:
            self.suggestions, self.index, self.moved = list(offers), 0, False
            self.show()

    def move(self, step: int) -> None:
        self.index, self.moved = (self.index + step) % len(self.suggestions), True
        self.show()

    def show(self) -> None:
        self.display = bool(self.suggestions)
        width = max((len(offer.text) for offer in self.visible_suggestions), default=0)
        lines = []
        for offer in self.visible_suggestions:
            is_chosen = offer is self.selected
            words = one_line(offer.text).ljust(min(width, 40)) + (
                f"  {one_line(offer.description)}" if offer.description else ""
            )
            # A mark as well, for terminals without colours.
            lines.append(Text(("> " if is_chosen else "  ") + words, "reverse" if is_chosen else "", no_wrap=True))
        self.update(Text("\n", overflow="ellipsis", no_wrap=True).join(lines))

    @property
    def visible_suggestions(self) -> list[Suggestion]:
        """Those that are seen."""
        first = max(0, min(self.index - VISIBLE_ROWS // 2, len(self.suggestions) - VISIBLE_ROWS))
        return self.suggestions[first : first + VISIBLE_ROWS]

    def on_click(self, click: Click) -> None:
        click.stop()
        if click.y < len(self.visible_suggestions):
            self.index = self.suggestions.index(self.visible_suggestions[click.y])
            self.post_message(self.Taken())

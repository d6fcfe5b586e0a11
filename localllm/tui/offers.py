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

from localllm.conversation.attach import reference
from localllm.visible import one_line

COMMAND = re.compile(r"/\S*")
FILE = re.compile(r"""(?:^|(?<=\s))@(?:"(?P<quoted>[^"]*)|(?P<bare>[^\s"']*))$""")
MOST_FILES = 2000  # of a folder are looked at
MOST_OFFERS = 200
ROWS = 6


@dataclass(frozen=True)
class Offer:
    text: str  # what is put in
    about: str = ""
    begin: int = 0  # of what it takes the place of: the column, on the line of the cursor


def commands_for(line: str, commands: Sequence[tuple[str, str]]) -> list[Offer]:
    """line: up to the cursor. Nothing where it is no command, or one and its words."""
    if not COMMAND.fullmatch(line):
        return []
    return [Offer(name, about) for name, about in commands if name.startswith(line)]


def names_file(line: str) -> bool:
    """Does the line, up to the cursor, end in what may name a file?"""
    return FILE.search(line) is not None


def files_for(line: str) -> list[Offer]:
    """line: up to the cursor. Folders first; those that begin with a dot only where that was written."""
    if not (found := FILE.search(line)):
        return []
    word = found["bare"] if found["quoted"] is None else found["quoted"]
    folder, begin = os.path.split(word)
    folders, files = [], []
    with suppress(OSError, RuntimeError), os.scandir(Path(folder or ".").expanduser()) as entries:
        for entry, _ in zip(entries, range(MOST_FILES), strict=False):
            if entry.name.startswith(begin) and entry.name.startswith(".") == begin.startswith("."):
                path = os.path.join(folder, entry.name)
                (folders if entry.is_dir() else files).append(path)
    named = [(_to_go_on(path), "folder") for path in sorted(folders)] + [(reference(p), "") for p in sorted(files)]
    return [Offer(text, about, found.start()) for text, about in named[:MOST_OFFERS]]


def _to_go_on(folder: str) -> str:
    """A quote is left open, as a file in the folder follows."""
    return f'@"{folder}/' if re.search(r"\s", folder) else f"@{folder}/"


class Offers(Static):
    """A list of a few lines, one of which is chosen. It is not there while there is nothing to offer."""

    DEFAULT_CSS = """
    Offers { display: none; height: auto; padding: 0 1; background: $panel; }
    """

    class Taken(Message):
        """One was clicked."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.offers: list[Offer] = []
        self.place = 0
        self.moved = False  # since they were offered

    @property
    def chosen(self) -> Offer | None:
        return self.offers[self.place] if self.offers else None

    def offer(self, offers: Sequence[Offer]) -> None:
        if offers or self.offers:
            self.offers, self.place, self.moved = list(offers), 0, False
            self.show()

    def move(self, step: int) -> None:
        self.place, self.moved = (self.place + step) % len(self.offers), True
        self.show()

    def show(self) -> None:
        self.display = bool(self.offers)
        width = max((len(offer.text) for offer in self.window), default=0)
        lines = []
        for offer in self.window:
            is_chosen = offer is self.chosen
            words = one_line(offer.text).ljust(min(width, 40)) + (
                f"  {one_line(offer.about)}" if offer.about else ""
            )
            # A mark as well, for terminals without colours.
            lines.append(Text(("> " if is_chosen else "  ") + words, "reverse" if is_chosen else "", no_wrap=True))
        self.update(Text("\n", overflow="ellipsis", no_wrap=True).join(lines))

    @property
    def window(self) -> list[Offer]:
        """Those that are seen."""
        first = max(0, min(self.place - ROWS // 2, len(self.offers) - ROWS))
        return self.offers[first : first + ROWS]

    def on_click(self, click: Click) -> None:
        click.stop()
        if click.y < len(self.window):
            self.place = self.offers.index(self.window[click.y])
            self.post_message(self.Taken())

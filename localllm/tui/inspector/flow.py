"""Tokens laid out as text in lines of a given width, with what is not seen made visible. Pure Python."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells

from localllm.formatting import CONTROL_PICTURES
from localllm.tui.inspector.record import AnswerToken, DraftStatus

WHITESPACE_SIGNS = {" ": "·", "\t": "⇥", "\n": "↵"}
DRAFT_MARKS = {DraftStatus.ACCEPTED: "✓", DraftStatus.REJECTED: "✗", DraftStatus.NONE: ""}


def printable(text: str) -> str:
    """One line: white space as signs, and nothing that moves a cursor, turns the writing around or hides."""
    return "".join(map(_printable_character, text)) or "∅"


def _printable_character(character: str) -> str:
    if character in WHITESPACE_SIGNS:
        return WHITESPACE_SIGNS[character]
    if ord(character) in CONTROL_PICTURES:
        return chr(CONTROL_PICTURES[ord(character)])
    kind = unicodedata.category(character)
    if kind in ("Mn", "Me"):
        return "◌" + character
    return "�" if kind in ("Cf", "Cs", "Co", "Cn", "Zl", "Zp") else character


@dataclass(frozen=True)
class PlacedToken:
    """A token, or a part of a long one, on its line."""

    index: int  # in the tokens that were laid out
    column: int
    text: str


class TokenFlow:
    """Lines that grow with the tokens: what is laid out stays where it is until the width changes."""

    def __init__(self, width: int):
        self.width = max(width, 2)
        self.lines: list[list[PlacedToken]] = [[]]
        self.line_of: list[int] = []  # on which each token begins
        self.column = 0
        self.draft_status = DraftStatus.NONE

    def extend(self, tokens: Sequence[AnswerToken]) -> None:
        """The tokens from the first that is not laid out yet."""
        for token in tokens[len(self.line_of) :]:
            self.add(token)

    def add(self, token: AnswerToken) -> None:
        mark = (
            DRAFT_MARKS[token.draft_status] if token.draft_status is not self.draft_status else ""
        )  # once for neighbours
        self.draft_status = token.draft_status
        text = mark + printable(token.text)
        if self.column and self.column + cell_len(text) > self.width:
            self.new_line()
        index = len(self.line_of)
        self.line_of.append(len(self.lines) - 1)
        for part in chop_cells(text, self.width):
            if self.column and self.column + cell_len(part) > self.width:
                self.new_line()
            self.lines[-1].append(PlacedToken(index, self.column, part))
            self.column += cell_len(part)
        if token.text.endswith("\n") and token.draft_status is not DraftStatus.REJECTED:
            self.new_line()

    def new_line(self) -> None:
        self.lines.append([])
        self.column = 0

    def token_at(self, line: int, column: int) -> int | None:
        """Which token stands there, or last before; None where none does."""
        if not 0 <= line < len(self.lines):
            return None
        before = [placed.index for placed in self.lines[line] if placed.column <= column]
        return before[-1] if before else None

    def token_lines_away(self, index: int, lines: int) -> int:
        """The token so many lines farther on in the same column, as far as there are lines."""
        line = self.line_of[index]
        column = next((placed.column for placed in self.lines[line] if placed.index == index), 0)
        target = max(0, min(line + lines, len(self.lines) - 1))
        while not self.lines[target]:
            target -= 1
        found = self.token_at(target, column)
        return index if found is None else found

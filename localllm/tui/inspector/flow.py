"""Tokens laid out as text in lines of a given width, with what is not seen made visible. Pure Python."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells

from localllm.tui.inspector.record import Guess, Token
from localllm.visible import VISIBLE

SEEN = {" ": "·", "\t": "⇥", "\n": "↵"}
MARKS = {Guess.RIGHT: "✓", Guess.WRONG: "✗", Guess.NONE: ""}


def signs(text: str) -> str:
    """One line: white space as signs, and nothing that moves a cursor, turns the writing around or hides."""
    return "".join(map(_sign, text)) or "∅"


def _sign(character: str) -> str:
    if character in SEEN:
        return SEEN[character]
    if ord(character) in VISIBLE:
        return chr(VISIBLE[ord(character)])
    kind = unicodedata.category(character)
    if kind in ("Mn", "Me"):
        return "◌" + character
    return "�" if kind in ("Cf", "Cs", "Co", "Cn", "Zl", "Zp") else character


@dataclass(frozen=True)
class Placed:
    """A token, or a part of a long one, on its line."""

    index: int  # in the tokens that were laid out
    column: int
    text: str


class Flow:
    """Lines that grow with the tokens: what is laid out stays where it is until the width changes."""

    def __init__(self, width: int):
        self.width = max(width, 2)
        self.lines: list[list[Placed]] = [[]]
        self.line_of: list[int] = []  # on which each token begins
        self.column = 0
        self.guess = Guess.NONE

    def extend(self, tokens: Sequence[Token]) -> None:
        """The tokens from the first that is not laid out yet."""
        for token in tokens[len(self.line_of) :]:
            self.add(token)

    def add(self, token: Token) -> None:
        mark = MARKS[token.guess] if token.guess is not self.guess else ""  # once for neighbours
        self.guess = token.guess
        text = mark + signs(token.text)
        if self.column and self.column + cell_len(text) > self.width:
            self.turn()
        index = len(self.line_of)
        self.line_of.append(len(self.lines) - 1)
        for part in chop_cells(text, self.width):
            if self.column and self.column + cell_len(part) > self.width:
                self.turn()
            self.lines[-1].append(Placed(index, self.column, part))
            self.column += cell_len(part)
        if token.text.endswith("\n") and token.guess is not Guess.WRONG:
            self.turn()

    def turn(self) -> None:
        self.lines.append([])
        self.column = 0

    def at(self, line: int, column: int) -> int | None:
        """Which token stands there, or last before; None where none does."""
        if not 0 <= line < len(self.lines):
            return None
        before = [placed.index for placed in self.lines[line] if placed.column <= column]
        return before[-1] if before else None

    def near(self, index: int, lines: int) -> int:
        """The token so many lines farther on in the same column, as far as there are lines."""
        line = self.line_of[index]
        column = next((placed.column for placed in self.lines[line] if placed.index == index), 0)
        target = max(0, min(line + lines, len(self.lines) - 1))
        while not self.lines[target]:
            target -= 1
        found = self.at(target, column)
        return index if found is None else found

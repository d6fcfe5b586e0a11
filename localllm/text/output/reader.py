"""Parses a complete text from left to right: literals, text between them, JSON. Independent of models' formats."""

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

from localllm.request import EventType, ToolCall

_SPACE = re.compile(r"\s*")


class OutputDelta(NamedTuple):
    """Text of one kind, or a complete tool call."""

    kind: EventType
    text: str = ""
    call: ToolCall | None = None


class OutputParser(Protocol):
    """Parses an answer incrementally; the concatenated pieces do not depend on how the text was split.

    They hold every character of the answer except recognized markup and adjacent white space. Text that looks like
    a tool call but cannot be parsed as one is content.
    """

    def push(self, text: str) -> list[OutputDelta]: ...
    def finish(self) -> list[OutputDelta]: ...


class PlainParser:
    """An `OutputParser` for answers that consist only of content."""

    def push(self, text: str) -> list[OutputDelta]:
        return [OutputDelta(EventType.CONTENT, text)] if text else []

    def finish(self) -> list[OutputDelta]:
        return []


class MarkupScanner:
    """Finds the first of several literals, and detects a partial one at the end of a text."""

    def __init__(self, literals: Collection[str]):
        longest_first = sorted(filter(None, literals), key=len, reverse=True)
        self.search = re.compile("|".join(map(re.escape, longest_first)) or "(?!)").search
        """Match the first literal in a text, preferring the longest at the same position; None without one."""
        self._begun = frozenset(text[:length] for text in longest_first for length in range(1, len(text)))
        self._longest = max(map(len, self._begun), default=0)

    def count_partial(self, text: str) -> int:
        """Return how many of the last characters may begin a literal."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._begun:
                return length
        return 0


class MalformedCall(ValueError):
    """The text is not a tool call of this format."""


def _refuse(constant: str) -> NoReturn:
    raise MalformedCall(f"{constant} is not JSON")


def _finite(number: str) -> float:
    """Reject floats that overflow: they would be written again as Infinity."""
    return value if math.isfinite(value := float(number)) else _refuse(number)


# Not strict: models write unescaped line breaks into strings.
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_refuse)


class TextReader:
    """A text and a position in it. Methods that do not find what they need raise MalformedCall."""

    def __init__(self, text: str, schemas: Mapping[str, Any] | None = None):
        """`schemas`: for each function given to the model, the JSON schemas of its parameters by name."""
        self.text = text
        self.schemas = schemas or {}
        self.position = 0

    def at_end(self) -> bool:
        """Skip white space; return whether the text ends there."""
        self.position = _SPACE.match(self.text, self.position).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches ""
        return self.position == len(self.text)

    def accept(self, literal: str) -> bool:
        """Skip white space, and the literal if it follows."""
        matches = not self.at_end() and self.text.startswith(literal, self.position)
        self.position += len(literal) if matches else 0
        return matches

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            raise MalformedCall(f"no {literal} at {self.position}")

    def read_until(self, literal: str, *, before: tuple[str, ...] = ()) -> str:
        """Return the text up to the literal, and skip it; only if one of `before`, or the end, follows."""
        start = place = self.position
        while (place := self.text.find(literal, place)) >= 0:
            self.position = place = place + len(literal)
            if not before or self.at_end() or self.text.startswith(before, self.position):
                return self.text[start : place - len(literal)]
        raise MalformedCall(f"no {literal} after {start}")

    def read_match(self, pattern: re.Pattern[str]) -> str | None:
        """Return the pattern's match after white space, if any."""
        match = None if self.at_end() else pattern.match(self.text, self.position)
        self.position = match.end() if match else self.position
        return match.group() if match else None

    def read_json(self) -> Any:
        """Return the next JSON value."""
        self.at_end()
        try:
            value, self.position = _DECODER.raw_decode(self.text, self.position)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(str(error)) from None
        return value

"""Reads a whole text from left to right: literals, what stands between them, JSON. Knows no model's format."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

_SPACE = re.compile(r"\s*")


class MalformedCall(ValueError):
    """The text is no tool call of this format."""


def _refuse(constant: str) -> NoReturn:
    raise MalformedCall(f"{constant} is no JSON")


def _finite(number: str) -> float:
    """What is too large for a float would be written again as Infinity."""
    return value if math.isfinite(value := float(number)) else _refuse(number)


# Models write line ends into strings as they are.
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_refuse)


class TextReader:
    """A text and a place in it. Every method that does not find what it needs raises Malformed."""

    def __init__(self, text: str, schemas: Mapping[str, Any] | None = None):
        """`schemas`: for each function that the model knows, the JSON schemas of its parameters by name."""
        self.text = text
        self.schemas = schemas or {}
        self.position = 0

    def at_end(self) -> bool:
        """Pass over white space; is nothing left then?"""
        self.position = _SPACE.match(self.text, self.position).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches ""
        return self.position == len(self.text)

    def accept(self, literal: str) -> bool:
        """Pass over white space, and over the literal if it comes next."""
        found = not self.at_end() and self.text.startswith(literal, self.position)
        self.position += len(literal) if found else 0
        return found

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            raise MalformedCall(f"no {literal} at {self.position}")

    def read_until(self, literal: str, *, before: tuple[str, ...] = ()) -> str:
        """The text up to the literal, which is passed over; only where one of `before` comes next, or the end."""
        start = place = self.position
        while (place := self.text.find(literal, place)) >= 0:
            self.position = place = place + len(literal)
            if not before or self.at_end() or self.text.startswith(before, self.position):
                return self.text[start : place - len(literal)]
        raise MalformedCall(f"no {literal} after {start}")

    def read_match(self, pattern: re.Pattern[str]) -> str | None:
        """What the pattern matches after white space, if it does."""
        found = None if self.at_end() else pattern.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return found.group() if found else None

    def read_json(self) -> Any:
        """The JSON value that comes next."""
        self.at_end()
        try:
            value, self.position = _DECODER.raw_decode(self.text, self.position)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(str(error)) from None
        return value

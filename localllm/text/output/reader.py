"""Reads a whole text from left to right: literals, what stands between them, JSON. Knows no model's format."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

_SPACE = re.compile(r"\s*")


class Malformed(ValueError):
    """The text is no tool call of this format."""


def _refuse(constant: str) -> NoReturn:
    raise Malformed(f"{constant} is no JSON")


def _finite(number: str) -> float:
    """What is too large for a float would be written again as Infinity."""
    return value if math.isfinite(value := float(number)) else _refuse(number)


# Models write line ends into strings as they are.
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_refuse)


class Reader:
    """A text and a place in it. Every method that does not find what it needs raises Malformed."""

    def __init__(self, text: str, schemas: Mapping[str, Any] | None = None):
        """`schemas`: for each function that the model knows, the JSON schemas of its parameters by name."""
        self.text = text
        self.schemas = schemas or {}
        self.at = 0

    def at_end(self) -> bool:
        """Pass over white space; is nothing left then?"""
        self.at = _SPACE.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches ""
        return self.at == len(self.text)

    def sees(self, literal: str) -> bool:
        """Pass over white space, and over the literal if it comes next."""
        found = not self.at_end() and self.text.startswith(literal, self.at)
        self.at += len(literal) if found else 0
        return found

    def need(self, literal: str) -> None:
        if not self.sees(literal):
            raise Malformed(f"no {literal} at {self.at}")

    def until(self, literal: str, *, before: tuple[str, ...] = ()) -> str:
        """The text up to the literal, which is passed over; only where one of `before` comes next, or the end."""
        start = place = self.at
        while (place := self.text.find(literal, place)) >= 0:
            self.at = place = place + len(literal)
            if not before or self.at_end() or self.text.startswith(before, self.at):
                return self.text[start : place - len(literal)]
        raise Malformed(f"no {literal} after {start}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """What the pattern matches after white space, if it does."""
        found = None if self.at_end() else pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found.group() if found else None

    def json(self) -> Any:
        """The JSON value that comes next."""
        self.at_end()
        try:
            value, self.at = _DECODER.raw_decode(self.text, self.at)
        except (ValueError, RecursionError) as error:
            raise Malformed(str(error)) from None
        return value

"""Texts of markup in Lark: control tokens where a model has them, else letters."""

import json
import re
from collections.abc import Callable, Collection


class MarkupWriter:
    """`literals`: markup that may be control tokens, or has some in it; `token_of`: the control token that is
    written so, if there is one."""

    def __init__(self, literals: Collection[str], token_of: Callable[[str], int | None]):
        found = {literal: token_of(literal) for literal in literals if literal}
        self._tokens = {literal: token for literal, token in found.items() if token is not None}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._parts = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def literal(self, text: str) -> str:
        """The text alone; nothing of an empty one."""
        parts = filter(None, self._parts.split(text))
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else quote(part) for part in parts)

    def control_tokens(self, literals: Collection[str]) -> list[str]:
        """Those of them that are control tokens."""
        return [f"<[{self._tokens[literal]}]>" for literal in literals if literal in self._tokens]

    def text_until(self, rule: str, body: str, text: str) -> list[str]:
        """Rules for whatever the terminal `body` matches, and the text behind it, where it comes first."""
        first, *rest = self._parts.split(text)
        if not rest:
            return [f"{rule}[suffix={quote(text)}]: {body}"]
        # No letters can be a token, so the longest match ends right before it.
        letters = f"{rule.upper()}: {body} {quote(first)}" if first else f"{rule.upper()}: {body}"
        return [f"{rule}: {rule.upper()} {self.literal(''.join(rest))}", letters]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

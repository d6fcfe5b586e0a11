"""Markup texts in Lark: as control tokens if the model has them, otherwise as characters."""

import json
import re
from collections.abc import Callable, Collection


class MarkupWriter:
    """`literals`: markup that may be or contain control tokens; `token_of`: returns the control token with this
    text, if there is one.
    """

    def __init__(self, literals: Collection[str], token_of: Callable[[str], int | None]):
        found = {literal: token_of(literal) for literal in literals if literal}
        self._tokens = {literal: token for literal, token in found.items() if token is not None}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._parts = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def literal(self, text: str) -> str:
        """Return the Lark form of exactly this text; empty for an empty text."""
        parts = filter(None, self._parts.split(text))
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else quote(part) for part in parts)

    def control_tokens(self, literals: Collection[str]) -> list[str]:
        """Return those literals that are control tokens."""
        return [f"<[{self._tokens[literal]}]>" for literal in literals if literal in self._tokens]

    def text_until(self, rule: str, body: str, text: str) -> list[str]:
        """Return rules for a match of the terminal `body` followed by the first occurrence of the text."""
        first, *rest = self._parts.split(text)
        if not rest:
            return [f"{rule}[suffix={quote(text)}]: {body}"]
        # Characters cannot match a control token, so the longest match ends right before it.
        letters = f"{rule.upper()}: {body} {quote(first)}" if first else f"{rule.upper()}: {body}"
        return [f"{rule}: {rule.upper()} {self.literal(''.join(rest))}", letters]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

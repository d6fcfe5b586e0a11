"""Finds literals in a text that arrives in pieces. Independent of their meaning."""

import re
from collections.abc import Collection


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

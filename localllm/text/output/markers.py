"""Literals to be found in a text that is still coming. Knows nothing of what they mean."""

import re
from collections.abc import Collection


class MarkupScanner:
    """Finds the first of some literals, and tells where a text may be about to become one."""

    def __init__(self, literals: Collection[str]):
        longest_first = sorted(filter(None, literals), key=len, reverse=True)
        self.search = re.compile("|".join(map(re.escape, longest_first)) or "(?!)").search
        """The first literal of a text, the longest of those that begin at one place; None without one."""
        self._begun = frozenset(text[:length] for text in longest_first for length in range(1, len(text)))
        self._longest = max(map(len, self._begun), default=0)

    def count_partial(self, text: str) -> int:
        """How many of the last characters may be the beginning of a literal."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._begun:
                return length
        return 0

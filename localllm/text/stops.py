"""Finds stop strings in a stream of text."""

from typing import Any

_END = object()  # marks a node of the trie that completes a stop string


class StopStrings:
    """Ends a text before a stop string, wherever the boundaries of its pieces are.

    The stop string that is completed first wins; among those completed at the same character, the one that started
    first. So the result does not depend on how the text was split. Text that may still become a stop string is
    held back, at most the length of the longest one; time per character is bounded by the longest as well,
    regardless of their number.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._root: dict[Any, Any] = {}
        for stop in stops:
            node = self._root
            for character in stop:
                node = node.setdefault(character, {})
            node[_END] = stop
        self._held = ""
        self._begun: list[tuple[int, dict[Any, Any]]] = []  # (start in _held, node of the trie), oldest first
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be released, and whether a stop string was found; nothing is released after
        that.
        """
        if self.matched is not None or not self._root:
            return ("" if self.matched is not None else text), self.matched is not None
        first_new = len(self._held)
        self._held += text
        for position in range(first_new, len(self._held)):
            character = self._held[position]
            self._begun.append((position, self._root))
            self._begun = [(start, node[character]) for start, node in self._begun if character in node]
            for start, node in self._begun:
                if _END in node:
                    self.matched = node[_END]
                    return self._give(start), True
        return self._give(self._begun[0][0] if self._begun else len(self._held)), False

    def finish(self) -> str:
        """Return the text that was held back, nothing if a stop string was found. A new text may begin."""
        self._begun = []
        return "" if self.matched is not None else self._give(len(self._held))

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        self._begun = [(start - count, node) for start, node in self._begun]
        return given

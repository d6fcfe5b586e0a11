"""Converts token ids to text incrementally."""

from collections.abc import Collection, Sequence
from typing import Any

from localllm.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # for bytes that are not a character
_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes, so it ends within four tokens
_PROMPT_TOKENS = 16  # how far back in the prompt a context is searched
_WINDOW_TOKENS = 16  # when bytes that are not characters do not end, the window is cut to half of this
_END = object()  # marks a node of the trie that completes a stop string


class Detokenizer:
    """Decodes an answer while it grows. Joined pieces are `decode(prompt + ids)` without `decode(prompt)`.

    Only a short window is decoded again for a new token: the tokens of the last piece, which provide context
    (otherwise the decoder would strip a leading space), and the tokens whose text is not complete. Incomplete
    characters are held back. Where decoding depends on later bytes (with byte fallback, an invalid byte affects
    all adjacent byte tokens), only the invalid bytes become U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special: bool = True,
        shown_ids: Collection[int] = (),
    ):
        """prompt_ids: the tokens before the answer; the last ones are the first context.

        shown_ids: special tokens that are decoded nevertheless.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special and not shown_ids
        self._hidden = frozenset(tokenizer.special_ids) - frozenset(shown_ids) if shown_ids else frozenset[int]()
        self._window = self._context(prompt_ids)
        self._fresh = len(self._window)  # index of the first token whose text is not complete
        text = self._decode(self._window)
        self._given = text[: len(text) - _unsettled(text)]  # text of the window that has been returned
        self._prompt_end = text if self._given != text else ""  # ends in U+FFFD, or in bytes that tokens complete

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        return self._push(ids[0]) if len(ids) == 1 else "".join(map(self._push, ids))

    def finish(self) -> str:
        """Return the rest: bytes that never became a character, as U+FFFD."""
        text = self._decode(self._window)
        if not text.startswith(self._given):
            text, self._given = self._decode(self._window[self._fresh :]), ""
        self._skip_prompt_end(text)
        rest, self._given = text[len(self._given) :], text
        return rest

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        settled = text[: len(text) - _unsettled(text)]
        self._skip_prompt_end(settled)
        if not settled.startswith(self._given):
            # Byte fallback decodes a run of byte tokens together: an incomplete character affects all of it.
            if len(self._window) - self._fresh < _CHARACTER_TOKENS:
                return ""
            self._window, self._fresh, self._given = self._window[self._fresh :], 0, ""
            text = self._decode(self._window)
            settled = text[: len(text) - _unsettled(text)]
        piece, self._given = settled[len(self._given) :], settled
        if piece:
            self._prompt_end = ""
        if settled == text and piece:
            self._window = self._window[self._fresh :]
            self._given = self._decode(self._window)
            self._fresh = len(self._window)
        elif settled == text and self._given:
            del self._window[self._fresh :]  # a skipped special token
        elif len(self._window) > _WINDOW_TOKENS:
            self._window, self._fresh = self._window[-_WINDOW_TOKENS // 2 :], 0
            again = self._decode(self._window)
            self._given = again[: len(again) - _unsettled(text)]
        return piece

    def _skip_prompt_end(self, text: str) -> None:
        """Count a U+FFFD at the end of the prompt as returned, once it is known that no token completed it."""
        if self._prompt_end and text.startswith(self._prompt_end):
            self._given, self._prompt_end = self._prompt_end, ""

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the shortest suffix that has text and begins with a complete character."""
        tail = list(prompt_ids[-_PROMPT_TOKENS:])
        for start in range(len(tail) - 1, -1, -1):
            text = self._decode(tail[start:])
            if text and _REPLACEMENT not in text:
                return tail[start:]
        return tail

    def _decode(self, ids: list[int]) -> str:
        if self._hidden:
            ids = [token for token in ids if token not in self._hidden]
        if len(ids) == 1:  # as the context of every token is that follows text
            return self._tokenizer.decode_token(ids[0], skip_special=self._skip_special)
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def _unsettled(text: str) -> int:
    """Return how many characters at the end may be incomplete: byte fallback writes one U+FFFD per byte."""
    if not text.endswith(_REPLACEMENT):
        return 0
    last = text[-(_CHARACTER_TOKENS - 1) :]
    return len(last) - len(last.rstrip(_REPLACEMENT))


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

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that can be released, and whether a stop string was found; nothing is released after
        that.

        may_end: whether a stop string that is completed by this text counts
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
                if may_end and _END in node:
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

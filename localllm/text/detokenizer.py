"""Token ids to text, piece by piece. Knows nothing of stop strings or of who reads the text."""

from collections.abc import Collection, Sequence

from localllm.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character
_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes, so it ends within four tokens
_PROMPT_TOKENS = 16  # how far back the prompt is searched for a context
_WINDOW_TOKENS = 16  # when bytes that are no characters never end, the window is cut back to half of this


class Detokenizer:
    """Decodes an answer while it grows. Pieces joined are `decode(prompt + ids)` without `decode(prompt)`.

    Only a short window is decoded again for a new token: the tokens of the last piece, which tell the decoder
    that the text is under way (it would strip a leading space otherwise), and the tokens whose text is not
    complete. Half a character is held back. Where a whole decode depends on bytes to come (with byte fallback
    one bad byte spoils all byte tokens beside it), the bad bytes alone become U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special: bool = True,
        shown_ids: Collection[int] = (),
    ):
        """`prompt_ids`: what the answer continues; its last tokens are the first context.

        shown_ids: special tokens that are not skipped all the same.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special and not shown_ids
        self._hidden = frozenset(tokenizer.special_ids) - frozenset(shown_ids) if shown_ids else frozenset[int]()
        self._window = self._context(prompt_ids)
        self._fresh = len(self._window)  # where the tokens begin whose text is not complete
        text = self._decode(self._window)
        self._given = text[: len(text) - _unsettled(text)]  # the part of the window's text that is given out

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join(map(self._push, ids))

    def finish(self) -> str:
        """The rest: bytes that never became a character, as U+FFFD."""
        text = self._decode(self._window)
        if not text.startswith(self._given):
            text, self._given = self._decode(self._window[self._fresh :]), ""
        rest, self._given = text[len(self._given) :], text
        return rest

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        settled = text[: len(text) - _unsettled(text)]
        if not settled.startswith(self._given):
            # Byte fallback decodes a run of byte tokens as a whole: half a character spoils all of it.
            if len(self._window) - self._fresh < _CHARACTER_TOKENS:
                return ""
            self._window, self._fresh, self._given = self._window[self._fresh :], 0, ""
            text = self._decode(self._window)
            settled = text[: len(text) - _unsettled(text)]
        piece, self._given = settled[len(self._given) :], settled
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

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The fewest last tokens that show as text and begin with a whole character."""
        tail = list(prompt_ids[-_PROMPT_TOKENS:])
        for start in range(len(tail) - 1, -1, -1):
            text = self._decode(tail[start:])
            if text and _REPLACEMENT not in text:
                return tail[start:]
        return tail

    def _decode(self, ids: list[int]) -> str:
        if self._hidden:
            ids = [token for token in ids if token not in self._hidden]
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def _unsettled(text: str) -> int:
    """How much of the end may be half a character: byte fallback writes one U+FFFD for each byte."""
    last = text[-(_CHARACTER_TOKENS - 1) :]
    return len(last) - len(last.rstrip(_REPLACEMENT))

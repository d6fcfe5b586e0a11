"""Control tokens written in messages: finds them, marks them through the template, and removes the marks.

A user may type `<|im_start|>`. As a control token, it would let them speak as the system; it must reach the model
as plain text. A template mixes messages with its own control tokens, so literals inside messages are wrapped in a
pair of private-use characters that occur nowhere else in the chat, and the rendered text is split at them. The
characters never leave this package.
"""

import bisect
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_PRIVATE_USE = range(0xF0000, 0xF0000 + 0xFFFE)


@dataclass(frozen=True)
class ChatPiece:
    """A part of a rendered chat. `literal`: a control token from a message, which is plain text."""

    text: str
    literal: bool = False


@dataclass(frozen=True)
class RenderedChat:
    """A chat as rendered by the template, for `Tokenizer.encode_chat`."""

    pieces: tuple[ChatPiece, ...]

    @property
    def text(self) -> str:
        """The entire text, for display. Encoding it as a prompt would let control tokens in messages through."""
        return "".join(piece.text for piece in self.pieces)


def find_unused_characters(text: str) -> tuple[str, str]:
    """Return two private-use characters that are not in the text, nor are their JSON escapes.

    Raises StopIteration if there are none.
    """
    used = set(text)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used and _escaped(chr(code))[-5:] not in text)
    return next(free), next(free)


def _escaped(character: str) -> str:
    return json.dumps(character).strip('"')


class LiteralMarker:
    """Finds tokens by their spelling in texts. `marks` is a pair of unused characters."""

    def __init__(self, literals: Collection[str]):
        self._sorted = sorted(literals)
        self._longest = max(map(len, literals), default=0)
        self._starts = {text[:2] for text in literals}
        # A tokenizer with only these tokens finds them in one pass, longest first, like the model's own.
        self._finder = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._finder.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in literals])

    def mark(self, value: Any, marks: tuple[str, str]) -> Any:
        """Return a copy of a JSON value with every literal in its strings and keys wrapped in the marks."""
        if isinstance(value, str):
            return self._mark_string(value, marks)
        if isinstance(value, Mapping):
            return {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marks) for item in value]
        return value

    def split(self, text: str, marks: tuple[str, str]) -> RenderedChat:
        """Split at the marks and remove them.

        A mark without its partner (templates may cut strings) also splits.
        """
        start, end = marks
        for mark in marks:
            text = text.replace(_escaped(mark), mark)  # a template may use ensure_ascii
        parts = re.split(f"{start}([^{start}{end}]*){end}|[{start}{end}]", text)
        # Plain text is at even indices, marked text at odd ones; None for a single mark.
        pieces = (ChatPiece(part, i % 2 == 1 and self._has(part)) for i, part in enumerate(parts) if part)
        return RenderedChat(tuple(pieces))

    def _has(self, text: str) -> bool:
        return self._finder.token_to_id(text) is not None

    def _mark_string(self, text: str, marks: tuple[str, str]) -> str:
        start, end = marks
        parts: list[str] = []
        done = 0
        # The finder takes a second per MB; most texts contain no beginning of a literal.
        may_have_literals = any(start in text for start in self._starts)
        for begin, stop in self._finder.encode(text).offsets if may_have_literals else ():
            parts += text[done:begin], start, text[begin:stop], end
            done = stop
        marked = "".join(parts) + text[done:]
        stripped = marked.rstrip()
        if any(
            self._begins_with(stripped[-length:]) for length in range(1, min(self._longest, len(stripped) + 1))
        ):
            # The next part of the message could complete the literal: a single mark separates them.
            return stripped + end + marked[len(stripped) :]
        return marked

    def _begins_with(self, prefix: str) -> bool:
        index = bisect.bisect_left(self._sorted, prefix)
        return index < len(self._sorted) and self._sorted[index].startswith(prefix)

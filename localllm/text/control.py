"""Control tokens that somebody wrote in a message: found, marked through the template, and taken out again.

A user may type `<|im_start|>`. As a control token it would let them speak as the system; it must reach the
model as the text it is. A template mixes messages with control tokens of its own, so the literals inside
messages are wrapped in a pair of private-use characters that stand nowhere else in the chat, and the rendered
text is cut at them. The characters never leave this package.
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
    """A stretch of a rendered chat. `literal`: a control token that came from a message and is only text."""

    text: str
    literal: bool = False


@dataclass(frozen=True)
class RenderedChat:
    """A chat as the template wrote it, for `Tokenizer.encode_chat`."""

    pieces: tuple[ChatPiece, ...]

    @property
    def text(self) -> str:
        """The whole, for people. Encoded as a prompt, it lets control tokens in messages through."""
        return "".join(piece.text for piece in self.pieces)


def find_unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that are not in the text, nor their JSON escapes.

    Raises StopIteration if there are none.
    """
    used = set(text)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used and _escaped(chr(code))[-5:] not in text)
    return next(free), next(free)


def _escaped(character: str) -> str:
    return json.dumps(character).strip('"')


class LiteralMarker:
    """Some tokens as they are written, to be found in texts. `marks` is a pair of unused characters."""

    def __init__(self, literals: Collection[str]):
        self._sorted = sorted(literals)
        self._longest = max(map(len, literals), default=0)
        # A tokenizer of these tokens alone finds them in one pass, longest first, as the model's own does.
        self._finder = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._finder.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in literals])

    def mark(self, value: Any, marks: tuple[str, str]) -> Any:
        """A copy of this JSON value with every literal in its strings and keys wrapped in the marks."""
        if isinstance(value, str):
            return self._mark_string(value, marks)
        if isinstance(value, Mapping):
            return {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marks) for item in value]
        return value

    def split(self, text: str, marks: tuple[str, str]) -> RenderedChat:
        """Take the marks out. One that lost its partner (a template may cut strings) still parts the text."""
        start, end = marks
        for mark in marks:
            text = text.replace(_escaped(mark), mark)  # a template may write JSON with ensure_ascii
        parts = re.split(f"{start}([^{start}{end}]*){end}|[{start}{end}]", text)
        # Plain text stands at even places, what was marked at odd ones; None for a lone mark.
        pieces = (ChatPiece(part, i % 2 == 1 and self._has(part)) for i, part in enumerate(parts) if part)
        return RenderedChat(tuple(pieces))

    def _has(self, text: str) -> bool:
        return self._finder.token_to_id(text) is not None

    def _mark_string(self, text: str, marks: tuple[str, str]) -> str:
        start, end = marks
        parts: list[str] = []
        done = 0
        for begin, stop in self._finder.encode(text).offsets:
            parts += text[done:begin], start, text[begin:stop], end
            done = stop
        marked = "".join(parts) + text[done:]
        bare = marked.rstrip()
        if any(self._begins_with(bare[-length:]) for length in range(1, min(self._longest, len(bare) + 1))):
            # The next part of the message could complete the literal: a lone mark parts them.
            return bare + end + marked[len(bare) :]
        return marked

    def _begins_with(self, half: str) -> bool:
        place = bisect.bisect_left(self._sorted, half)
        return place < len(self._sorted) and self._sorted[place].startswith(half)

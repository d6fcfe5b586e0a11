"""A stretch of an answer that may be tool calls: collected until its end is sure, then read at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.request import ToolCall
from localllm.text.output.calls import CallReader
from localllm.text.output.markers import MarkupScanner
from localllm.text.output.reader import MalformedCall, TextReader
from localllm.text.output.spelling import ToolCallSyntax

_TAIL = 80  # characters before an end that are looked at


@dataclass(frozen=True)
class ToolCallFormat:
    """How the tool calls of a model stand in its answers."""

    read: CallReader
    begin: tuple[str, ...]
    """Markup before calls."""

    end: str = ""
    """Markup after them; without it, calls are the last of an answer."""

    string_quote: str = ""
    """What strings stand in; an end within a string is text."""

    expected_next: tuple[str, ...] = ()
    """What comes next after `begin`; anything else is no call, and the answer need not wait for the end."""

    expected_before_end: str = ""
    """What stands right before an end; anything else, and it is text."""

    inner_markup: tuple[str, ...] = ()
    """Markup between `begin` and `end` that may be control tokens."""

    bare_begin: str = ""
    """What an answer begins with that is a call without markup."""

    syntax: ToolCallSyntax = field(kw_only=True)
    """How such a model is made to write calls."""


class ToolCallBlock:
    """One such stretch. After `push` gave a rest, or `finish`, either `calls` or `raw` is what it was."""

    calls: list[ToolCall]
    raw_text: str

    def __init__(self, form: ToolCallFormat, begin: str, schemas: Mapping[str, Any]):
        """`begin`: the markup that was found, "" for a bare call."""
        self._form = form
        self._begin = begin
        self._schemas = schemas
        self._pieces: list[str] = []
        self._tail = ""  # of what is in the pieces
        self._unread = ""
        self._begun = not form.expected_next
        self._in_quotes = False
        escapes = ("\\\\", '\\"') if form.string_quote == '"' else ()
        # Where strings have no quotes, the beginning of a block may stand in one.
        again = form.begin if form.string_quote else ()
        self._markers = MarkupScanner((form.end, form.string_quote, *escapes, *again) if form.end else ())
        self.calls, self.raw_text = [], ""

    def push(self, text: str) -> str | None:
        """What comes after the block; None while it goes on."""
        self._unread += text
        if not self._begun and not self._begins():
            return self._rejected()
        while self._begun and (found := self._markers.search(self._unread)):
            marker = found.group()
            self._settle(found.start())
            self._unread = self._unread[len(marker) :]
            if marker == self._form.end and not self._in_quotes and self._may_end():
                self._read(marker)
                return self._unread
            if marker in self._form.begin and not self._in_quotes:
                self._read("")  # its end was forgotten, or it was no call: the next one may be
                return marker + self._unread
            if marker == self._form.string_quote:
                self._in_quotes = not self._in_quotes
            self._append(marker)
        if self._begun:
            self._settle(len(self._unread) - self._markers.count_partial(self._unread))
        return None

    def finish(self) -> None:
        """The answer ends here, maybe before the block's end was said."""
        self._settle(len(self._unread))
        self._read("")

    def _begins(self) -> bool:
        """Can this still be a call?"""
        text = self._unread.lstrip()
        self._begun = text.startswith(self._form.expected_next)
        return self._begun or any(first.startswith(text) for first in self._form.expected_next)

    def _rejected(self) -> str:
        self.raw_text = self._begin
        return self._unread

    def _may_end(self) -> bool:
        return not self._form.expected_before_end or self._tail.rstrip().endswith(self._form.expected_before_end)

    def _settle(self, length: int) -> None:
        self._append(self._unread[:length])
        self._unread = self._unread[length:]

    def _append(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._tail = (self._tail + text)[-_TAIL:]

    def _read(self, end: str) -> None:
        body = "".join(self._pieces)
        reader = TextReader(body, self._schemas)
        try:
            calls = self._form.read(reader)
            if not reader.at_end():
                raise MalformedCall("text after the calls")
            self.calls = calls
        except (MalformedCall, RecursionError):
            pass
        if not self.calls:
            self.raw_text = self._begin + body + end

"""A part of an answer that may be tool calls: buffered until its end is certain, then parsed at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.request import ToolCall
from localllm.text.output.calls import CallReader
from localllm.text.output.reader import MalformedCall, MarkupScanner, TextReader
from localllm.text.output.spelling import ToolCallSyntax

_TAIL = 80  # characters before an end marker that are examined


@dataclass(frozen=True)
class ToolCallFormat:
    """Markup of tool calls in a model's answers."""

    read: CallReader
    begin: tuple[str, ...]
    """Markup before calls."""

    end: str = ""
    """Markup after calls; without it, calls extend to the end of the answer."""

    string_quote: str = ""
    """Quotes around strings; an end marker within a string is text."""

    expected_next: tuple[str, ...] = ()
    """Strings of which one must follow `begin`; otherwise it is not a call, and is output without waiting for the
    end."""

    expected_before_end: str = ""
    """String that must directly precede an end marker; otherwise the marker is text."""

    inner_markup: tuple[str, ...] = ()
    """Markup between `begin` and `end` that may be control tokens."""

    bare_begin: str = ""
    """First character of a call without markup, at the beginning of an answer."""

    syntax: ToolCallSyntax = field(kw_only=True)
    """Syntax of the calls that a grammar makes the model write."""


class ToolCallBlock:
    """A part of an answer with tool calls.

    Once `push` returns text or `finish` is called, either `calls` or `raw_text` holds the result.
    """

    calls: list[ToolCall]
    raw_text: str

    def __init__(self, tool_format: ToolCallFormat, begin: str, schemas: Mapping[str, Any]):
        """`begin`: the markup found, "" for a bare call."""
        self._form = tool_format
        self._begin = begin
        self._schemas = schemas
        self._pieces: list[str] = []
        self._tail = ""  # of the text in `_pieces`
        self._unread = ""
        self._begun = not tool_format.expected_next
        self._in_quotes = False
        escapes = ("\\\\", '\\"') if tool_format.string_quote == '"' else ()
        # If strings have no quotes, a begin marker may be part of one.
        begin_markers = tool_format.begin if tool_format.string_quote else ()
        self._markers = MarkupScanner(
            (tool_format.end, tool_format.string_quote, *escapes, *begin_markers) if tool_format.end else ()
        )
        self.calls, self.raw_text = [], ""

    def push(self, text: str) -> str | None:
        """Return the text after the block; None while it continues."""
        self._unread += text
        if not self._begun and not self._begins():
            return self._rejected()
        while self._begun and (match := self._markers.search(self._unread)):
            marker = match.group()
            self._settle(match.start())
            self._unread = self._unread[len(marker) :]
            if marker == self._form.end and not self._in_quotes and self._may_end():
                self._read(marker)
                return self._unread
            if marker in self._form.begin and not self._in_quotes:
                self._read("")  # its end was omitted, or it was not a call: the next one may be
                return marker + self._unread
            if marker == self._form.string_quote:
                self._in_quotes = not self._in_quotes
            self._append(marker)
        if self._begun:
            self._settle(len(self._unread) - self._markers.count_partial(self._unread))
        return None

    def finish(self) -> None:
        """The answer ends here, possibly before the block's end marker."""
        self._settle(len(self._unread))
        self._read("")

    def _begins(self) -> bool:
        """Whether this can still be a call."""
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

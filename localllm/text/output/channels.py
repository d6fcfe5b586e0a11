"""The parser for answers that consist of messages with headers, as gpt-oss writes them (the harmony format).

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}<|call|>
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.request import EventType, ToolCall
from localllm.text.output.reader import MalformedCall, MarkupScanner, OutputDelta, TextReader
from localllm.text.output.spelling import ToolCallSyntax

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
MAX_HEADER_CHARACTERS = 300  # a longer text is not a header
NON_FUNCTION_RECIPIENTS = ("", "user", "self", "all")

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")


@dataclass(frozen=True)
class ChannelFormat:
    """Markers that end such messages, and the parser for a message to the function of a given name."""

    message_ends: tuple[str, ...]
    read_calls: Callable[[str, TextReader], list[ToolCall]]
    syntax: ToolCallSyntax

    @property
    def markers(self) -> tuple[str, ...]:
        return (START, CHANNEL, CONSTRAIN, MESSAGE, *self.message_ends)


class ChannelParser:
    """An `OutputParser`. Messages to the channel `analysis` or to the model itself are reasoning; a message to a
    function is a call, if there are any functions; everything else is content, including text outside of messages.
    A truncated header outputs nothing.
    """

    def __init__(self, channel_format: ChannelFormat, schemas: Mapping[str, Any]):
        """`schemas` as in `TextReader`, empty without functions. The prompt has begun the first header."""
        self._form = channel_format
        self._schemas = schemas
        self._markers = MarkupScanner(channel_format.markers)
        self._header: str | None = ""  # text so far; None in the body of a message
        self._kind = EventType.CONTENT
        self._function = ""
        self._call: list[str] = []  # text of the message to the function so far
        self._unread = ""

    def push(self, text: str) -> list[OutputDelta]:
        self._unread += text
        deltas: list[OutputDelta] = []
        while True:
            match = self._markers.search(self._unread)
            settled = match.start() if match else len(self._unread) - self._markers.count_partial(self._unread)
            text, self._unread = self._unread[:settled], self._unread[match.end() if match else settled :]
            self._take(text, deltas)
            if match is None:
                return deltas
            self._meet(match.group(), deltas)

    def finish(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        self._take(self._unread, deltas)
        self._unread = ""
        self._end_message(deltas)
        return deltas

    def _take(self, text: str, deltas: list[OutputDelta]) -> None:
        """Add text to the current header or message."""
        if not text:
            return
        if self._header is not None:
            self._header += text
            if not _may_be_header(self._header):
                self._no_header(deltas)
        elif self._function:
            self._call.append(text)
        else:
            deltas.append(OutputDelta(self._kind, text))

    def _meet(self, marker: str, deltas: list[OutputDelta]) -> None:
        if marker in self._form.message_ends or (self._header is None and marker in (START, CHANNEL)):
            self._end_message(deltas)
            self._header = "" if marker in self._form.message_ends else marker
        elif self._header is None or marker != MESSAGE:
            self._take(marker, deltas)
        else:
            self._begin_message(self._header)

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        receiver = recipient[1] if recipient else ""
        is_reasoning = receiver == "self" or (channel is not None and channel[1] == "analysis")
        is_call = bool(self._schemas) and receiver not in NON_FUNCTION_RECIPIENTS
        self._function = receiver.removeprefix("functions.") if is_call else ""
        self._kind = EventType.REASONING if is_reasoning else EventType.CONTENT
        self._header = None

    def _end_message(self, deltas: list[OutputDelta]) -> None:
        if self._header and not self._header.startswith((START, CHANNEL)):
            self._no_header(deltas)
        if self._function:
            text = "".join(self._call)
            try:
                deltas += [
                    OutputDelta(EventType.TOOL_CALL, call=call)
                    for call in self._form.read_calls(self._function, TextReader(text, self._schemas))
                ]
            except (MalformedCall, RecursionError):
                deltas += [OutputDelta(EventType.CONTENT, text)] if text else []
        self._function = ""
        self._call.clear()

    def _no_header(self, deltas: list[OutputDelta]) -> None:
        deltas.append(OutputDelta(EventType.CONTENT, self._header or ""))
        self._header, self._kind = None, EventType.CONTENT


def _may_be_header(text: str) -> bool:
    return len(text) < MAX_HEADER_CHARACTERS and (
        text.startswith((START, CHANNEL)) or "to=".startswith(text.lstrip()[:3])
    )

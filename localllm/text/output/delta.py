"""One piece of a parsed answer, and the interface of parsers that produce them."""

from typing import NamedTuple, Protocol

from localllm.request import EventType, ToolCall


class OutputDelta(NamedTuple):
    """Text of one kind, or a complete tool call."""

    kind: EventType
    text: str = ""
    call: ToolCall | None = None


class OutputParser(Protocol):
    """Parses an answer incrementally; the concatenated pieces do not depend on how the text was split.

    They hold every character of the answer except recognized markup and adjacent white space. Text that looks like
    a tool call but cannot be parsed as one is content.
    """

    def push(self, text: str) -> list[OutputDelta]: ...
    def finish(self) -> list[OutputDelta]: ...


class PlainParser:
    """An `OutputParser` for answers that consist only of content."""

    def push(self, text: str) -> list[OutputDelta]:
        return [OutputDelta(EventType.CONTENT, text)] if text else []

    def finish(self) -> list[OutputDelta]:
        return []

"""A piece of an answer, told apart from the rest; and what a router of them promises."""

from typing import NamedTuple, Protocol

from localllm.request import EventType, ToolCall


class OutputDelta(NamedTuple):
    """Text of one kind, or a whole tool call."""

    kind: EventType
    text: str = ""
    call: ToolCall | None = None


class OutputParser(Protocol):
    """Takes an answer as it comes and gives its pieces, the same ones joined wherever the text was cut.

    Joined, the pieces hold every character of the answer but the markup that was understood, and the white
    space next to that. Whatever looks like a tool call and cannot be read as one is content.
    """

    def push(self, text: str) -> list[OutputDelta]: ...
    def finish(self) -> list[OutputDelta]: ...


class PlainParser:
    """A `Router` of answers that are content and nothing else."""

    def push(self, text: str) -> list[OutputDelta]:
        return [OutputDelta(EventType.CONTENT, text)] if text else []

    def finish(self) -> list[OutputDelta]:
        return []

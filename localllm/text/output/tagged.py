"""The parser for answers whose parts are enclosed in tags: `<think>...</think>`, `<tool_call>...</tool_call>`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.request import EventType
from localllm.text.output.blocks import ToolCallBlock, ToolCallFormat
from localllm.text.output.reader import MarkupScanner, OutputDelta

MAX_HELD_SPACE = 16  # characters; models write one or two line breaks next to markup


@dataclass(frozen=True)
class ReasoningFormat:
    """Markup before and after a model's reasoning."""

    begin: str
    end: str
    anywhere: bool = False
    """Reasoning may also follow content: its markup consists of control tokens, which no text resembles."""

    content_markup: tuple[str, ...] = ()
    """Markup around the content that carries no other meaning; if not control tokens, only after reasoning."""

    inner_markup: tuple[str, ...] = ()
    """Control tokens within `begin`, if it consists of several parts."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.content_markup)


class TaggedParser:
    """An `OutputParser`. White space next to markup belongs to it, so it is held back until the next text is
    known, but at most MAX_HELD_SPACE characters: endless line breaks must still be output, and reach stop strings.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolCallFormat | None,
        schemas: Mapping[str, Any],
        *,
        thinking: bool,
    ):
        """`thinking`: the prompt ended within reasoning. `schemas` as in `TextReader`."""
        self._reasoning = reasoning
        self._tools = tools
        self._schemas = schemas
        self._kind = EventType.REASONING if thinking else EventType.CONTENT
        self._said = False  # content has begun
        self._thought = thinking
        self._after_markup = thinking
        self._space = ""  # held back after the last output
        self._unread = ""
        self._block: ToolCallBlock | None = None
        content_markers = (reasoning.begin, *reasoning.content_markup) if reasoning else ()
        self._in_content = MarkupScanner((*content_markers, *(tools.begin if tools else ())))
        # Otherwise no markup is expected once content has begun.
        self._more_markup = bool(tools or (reasoning and (reasoning.anywhere or reasoning.content_markup)))
        self._in_reasoning = MarkupScanner([reasoning.end] if reasoning else [])

    def push(self, text: str) -> list[OutputDelta]:
        self._unread += text
        deltas: list[OutputDelta] = []
        while self._go_on(deltas):
            pass
        return deltas

    def finish(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        if self._block:
            self._block.finish()
            self._close(self._block, deltas)
        self._say(self._unread, deltas)
        if self._space:
            deltas.append(OutputDelta(self._kind, self._space))
        self._unread = self._space = ""
        return deltas

    def _go_on(self, deltas: list[OutputDelta]) -> bool:
        """Process the text up to and including the next markup. Return False if there is none yet."""
        if self._block:
            return self._read_block(self._block, deltas)
        if self._tools and self._may_be_bare() and self._unread.lstrip().startswith(self._tools.bare_begin):
            self._block = ToolCallBlock(self._tools, "", self._schemas)
            return True
        markers = self._in_reasoning if self._kind is EventType.REASONING else self._in_content
        match = markers.search(self._unread)
        if match is None:
            settled = len(self._unread) - markers.count_partial(self._unread)
            self._say(self._unread[:settled], deltas)
            self._unread = self._unread[settled:]
            return False
        self._say(self._unread[: match.start()], deltas)
        self._unread = self._unread[match.end() :]
        self._meet(match.group(), deltas)
        return True

    def _may_be_bare(self) -> bool:
        return bool(self._tools and self._tools.bare_begin) and self._kind is EventType.CONTENT and not self._said

    def _meet(self, marker: str, deltas: list[OutputDelta]) -> None:
        if self._tools and marker in self._tools.begin:
            self._block = ToolCallBlock(self._tools, marker, self._schemas)
        elif self._reasoning and self._is_text(marker, self._reasoning):
            self._say(marker, deltas)
        else:
            if self._reasoning and marker not in self._reasoning.content_markup:
                self._kind = EventType.REASONING if self._kind is EventType.CONTENT else EventType.CONTENT
                self._thought = True
            self._forget_space()

    def _is_text(self, marker: str, reasoning: ReasoningFormat) -> bool:
        """Whether this marker is unexpected here, and may be ordinary text."""
        if reasoning.anywhere:
            return False
        return (marker == reasoning.begin and self._said) or (
            marker in reasoning.content_markup and not self._thought
        )

    def _read_block(self, block: ToolCallBlock, deltas: list[OutputDelta]) -> bool:
        rest = block.push(self._unread)
        self._unread = rest or ""
        if rest is not None:
            self._close(block, deltas)
        return rest is not None

    def _close(self, block: ToolCallBlock, deltas: list[OutputDelta]) -> None:
        self._block = None
        if block.calls:
            deltas += [OutputDelta(EventType.TOOL_CALL, call=call) for call in block.calls]
            self._forget_space()
        else:
            self._say(block.raw_text, deltas)
            self._said = True

    def _forget_space(self) -> None:
        self._space = ""
        self._after_markup = True

    def _say(self, text: str, deltas: list[OutputDelta]) -> None:
        text = text.lstrip() if self._after_markup else text
        if not text:
            return
        self._after_markup = False
        text = self._space + text
        said = text.rstrip()
        if len(text) - len(said) > MAX_HELD_SPACE:
            said = text[:-MAX_HELD_SPACE]
        if self._kind is EventType.CONTENT and (self._said or said.strip()):
            self._said = True
            if not self._more_markup:
                said, self._in_content = text, MarkupScanner(())
        self._space = text[len(said) :]
        if said:
            deltas.append(OutputDelta(self._kind, said))

"""The answer token by token, coloured by how likely the model held each; without colour the unlikely are
underlined and the very unlikely bold as well. Drafts that were right follow a ✓, others are struck through
behind a ✗.
"""

import math
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from localllm.tui.inspector.flow import TokenFlow
from localllm.tui.inspector.record import AnswerRecord, AnswerToken, DraftStatus

PROBABILITY_BANDS = ((0.9, "sure"), (0.5, "likely"), (0.1, "unlikely"), (0.0, "rare"))  # from which probability on


def probability_band(token: AnswerToken) -> str:
    if token.draft_status is DraftStatus.REJECTED:
        return "wrong"
    if token.special:
        return "special"
    if math.isnan(token.probability):
        return "unknown"
    return next(name for least, name in PROBABILITY_BANDS if token.probability >= least)


class Tokens(ScrollView, can_focus=True):
    DEFAULT_CSS = """
    Tokens { width: 1fr; height: 1fr; min-height: 3; overflow-x: hidden; }
    Tokens { scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    Tokens > .tokens--sure { color: $text-success; }
    Tokens > .tokens--likely { color: $text-warning; }
    Tokens > .tokens--unlikely { color: $warning; text-style: underline; }
    Tokens > .tokens--rare { color: $text-error; text-style: bold underline; }
    Tokens > .tokens--unknown { color: $foreground; }
    Tokens > .tokens--wrong { color: $text-error 70%; text-style: strike dim; }
    Tokens > .tokens--right { background: $accent 25%; }
    Tokens > .tokens--special { color: $text-secondary; text-style: bold italic; }
    """
    COMPONENT_CLASSES: ClassVar = {
        *(f"tokens--{name}" for _, name in PROBABILITY_BANDS),
        *(f"tokens--{name}" for name in ("unknown", "special", "wrong", "right")),
    }
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "Token before", show=False),
        Binding("right", "move(1)", "Token after", show=False),
        Binding("up", "line(-1)", "Line above", show=False),
        Binding("down", "line(1)", "Line below", show=False),
        Binding("pageup", "line(-8)", "Page up", show=False),
        Binding("pagedown", "line(8)", "Page down", show=False),
        Binding("home", "first", "First token", show=False),
        Binding("end", "newest", "Newest token", show=False),
    ]

    class Chosen(Message):
        """Another token is looked at, or the newest is a new one; None: there are none."""

        def __init__(self, token: AnswerToken | None):
            super().__init__()
            self.token = token

    def __init__(self, record: AnswerRecord):
        super().__init__(id="flow")
        self.record = record
        self.flow = TokenFlow(1)
        self.laid_out = record.tokens  # in `flow`, as far as they were there
        self.dropped = 0  # tokens before these, which the record has let go of
        self.selected: int | None = None  # counted from the first of all; None: the newest

    def show(self, record: AnswerRecord) -> None:
        """Another answer, or more of the same."""
        if record is not self.record:
            self.record, self.selected = record, None
        follows = self.selected is None and (self.is_at_end or record.tokens is not self.laid_out)
        if record.tokens is not self.laid_out:
            self.lay_out()
        self.draw(follows=follows)

    def on_resize(self, event: Resize) -> None:
        self.lay_out()
        self.draw(follows=self.selected is None)

    @property
    def is_at_end(self) -> bool:
        """Nobody has scrolled back."""
        return self.scroll_offset.y >= self.max_scroll_y

    def lay_out(self) -> None:
        self.flow = TokenFlow(self.scrollable_content_region.width)
        self.laid_out, self.dropped = self.record.tokens, self.record.dropped_tokens

    def draw(self, *, follows: bool) -> None:
        """follows: to the newest token."""
        before = len(self.flow.lines)
        self.flow.extend(self.laid_out)
        if before != len(self.flow.lines) or self.virtual_size.height != before:
            self.virtual_size = Size(self.flow.width, len(self.flow.lines))
        if follows:
            self.scroll_end(animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Chosen(self.token))

    @property
    def index(self) -> int:
        """Of the token that is looked at, in the record's; -1 where there is none."""
        last = len(self.flow.line_of) - 1
        return last if self.selected is None else max(0, min(self.selected - self.dropped, last))

    @property
    def token(self) -> AnswerToken | None:
        return self.laid_out[self.index] if self.index >= 0 else None

    def select(self, place: int) -> None:
        if place >= len(self.flow.line_of) - 1:
            self.selected = None
        else:
            self.selected = max(place, 0) + self.dropped
            line = self.flow.line_of[max(place, 0)]
            self.scroll_to_region(Region(0, line, 1, 1), animate=False, immediate=True)
        self.draw(follows=self.selected is None)

    def action_move(self, by: int) -> None:
        self.select(self.index + by)

    def action_line(self, by: int) -> None:
        if self.index >= 0:
            self.select(self.flow.token_lines_away(self.index, by))

    def action_first(self) -> None:
        self.select(0)

    def action_newest(self) -> None:
        self.select(len(self.flow.line_of))

    def on_click(self, event: Click) -> None:
        found = self.flow.token_at(event.y + self.scroll_offset.y, event.x)
        if found is not None:
            self.select(found)

    def render_line(self, y: int) -> Strip:
        line = y + self.scroll_offset.y
        if not 0 <= line < len(self.flow.lines) or not self.laid_out:
            return Strip.blank(self.size.width, self.rich_style)
        segments = [Segment(placed.text, self.style_of(placed.index)) for placed in self.flow.lines[line]]
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)

    def style_of(self, index: int) -> Style:
        token = self.laid_out[index]
        style = self.get_component_rich_style(f"tokens--{probability_band(token)}")
        if token.draft_status is DraftStatus.ACCEPTED:
            style += Style(bgcolor=self.get_component_rich_style("tokens--right").bgcolor)
        if index == self.index:
            style += Style(reverse=True)
        return style

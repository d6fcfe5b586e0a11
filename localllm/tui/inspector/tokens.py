"""The answer token by token, coloured by probability, and the candidates of the selected token.

Without colours, unlikely tokens are underlined, and rare ones bold too. Accepted drafts follow a ✓; rejected ones
are struck through and follow a ✗.
"""

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.content import Content
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from localllm.formatting import CONTROL_PICTURES
from localllm.metrics import Candidate
from localllm.tui.drawing import bar
from localllm.tui.inspector.record import AnswerRecord, AnswerToken, DraftStatus, NewestCursor

WHITESPACE_SIGNS = {" ": "·", "\t": "⇥", "\n": "↵"}
DRAFT_MARKS = {DraftStatus.ACCEPTED: "✓", DraftStatus.REJECTED: "✗", DraftStatus.NONE: ""}

PROBABILITY_BANDS = ((0.9, "sure"), (0.5, "likely"), (0.1, "unlikely"), (0.0, "rare"))  # lower bounds


DIM_STYLE, MODEL_STYLE, SAMPLED_STYLE = "$foreground-muted", "$primary", "$success"
DRAFT_LABELS = {
    DraftStatus.NONE: "",
    DraftStatus.ACCEPTED: ", accepted draft",
    DraftStatus.REJECTED: ", rejected draft",
}
PERCENT_CELLS, TOKEN_CELLS = 6, 14  # column widths


class Tokens(NewestCursor, ScrollView, can_focus=True):
    """The tokens of an answer as flowing text, with a cursor."""

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
    BINDING_GROUP_TITLE = "Inspector: tokens"
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "Previous token", show=False),
        Binding("right", "move(1)", "Next token", show=False),
        Binding("up", "line(-1)", "Line above", show=False),
        Binding("down", "line(1)", "Line below", show=False),
        Binding("pageup", "line(-8)", "Page up", show=False),
        Binding("pagedown", "line(8)", "Page down", show=False),
        Binding("home", "first", "First token", show=False),
        Binding("end", "newest", "Newest token", show=False),
    ]

    class Chosen(Message):
        """Another token is selected, or the newest token has changed; None if there are no tokens."""

        def __init__(self, token: AnswerToken | None):
            super().__init__()
            self.token = token

    def __init__(self, record: AnswerRecord):
        super().__init__(id="flow")
        self.record = record
        self.flow = TokenFlow(1)
        self.laid_out = record.tokens  # in `flow`, as many as there were
        self.dropped = 0  # tokens that the record has dropped before these

    def show(self, record: AnswerRecord) -> None:
        """Show another answer, or the new tokens of the same one."""
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
        """Whether the newest line is visible."""
        return self.scroll_offset.y >= self.max_scroll_y

    def lay_out(self) -> None:
        self.flow = TokenFlow(self.scrollable_content_region.width)
        self.laid_out, self.dropped = self.record.tokens, self.record.dropped_tokens

    def draw(self, *, follows: bool) -> None:
        """Lay out new tokens. follows: whether to scroll to the newest one"""
        line_count = len(self.flow.lines)
        self.flow.extend(self.laid_out)
        if line_count != len(self.flow.lines) or self.virtual_size.height != line_count:
            self.virtual_size = Size(self.flow.width, len(self.flow.lines))
        if follows:
            self.scroll_end(animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Chosen(self.token))

    @property
    def item_counts(self) -> tuple[int, int]:
        return len(self.flow.line_of), self.dropped

    @property
    def token(self) -> AnswerToken | None:
        """The selected token."""
        return self.laid_out[self.index] if self.index >= 0 else None

    def show_selection(self) -> None:
        if self.selected is not None:
            line = self.flow.line_of[self.index]
            self.scroll_to_region(Region(0, line, 1, 1), animate=False, immediate=True)
        self.draw(follows=self.selected is None)

    def action_line(self, by: int) -> None:
        if self.index >= 0:
            self.select(self.flow.token_lines_away(self.index, by))

    def on_click(self, event: Click) -> None:
        index = self.flow.token_at(event.y + self.scroll_offset.y, event.x)
        if index is not None:
            self.select(index)

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


def probability_band(token: AnswerToken) -> str:
    if token.draft_status is DraftStatus.REJECTED:
        return "wrong"
    if token.special:
        return "special"
    if math.isnan(token.probability):
        return "unknown"
    return next(name for least, name in PROBABILITY_BANDS if token.probability >= least)


@dataclass(frozen=True)
class PlacedToken:
    """A token, or part of a long one, in a line."""

    index: int  # among the tokens laid out
    column: int
    text: str


class TokenFlow:
    """Tokens laid out in lines of a width. Further tokens do not move earlier ones. Independent of widgets."""

    def __init__(self, width: int):
        self.width = max(width, 2)
        self.lines: list[list[PlacedToken]] = [[]]
        self.line_of: list[int] = []  # line in which each token begins
        self.column = 0
        self.draft_status = DraftStatus.NONE

    def extend(self, tokens: Sequence[AnswerToken]) -> None:
        """Lay out the tokens that are not laid out yet."""
        for token in tokens[len(self.line_of) :]:
            self.add(token)

    def add(self, token: AnswerToken) -> None:
        mark = (
            DRAFT_MARKS[token.draft_status] if token.draft_status is not self.draft_status else ""
        )  # once for neighbours
        self.draft_status = token.draft_status
        text = mark + printable(token.text)
        if self.column and self.column + cell_len(text) > self.width:
            self.new_line()
        index = len(self.line_of)
        self.line_of.append(len(self.lines) - 1)
        for part in chop_cells(text, self.width):
            if self.column and self.column + cell_len(part) > self.width:
                self.new_line()
            self.lines[-1].append(PlacedToken(index, self.column, part))
            self.column += cell_len(part)
        if token.text.endswith("\n") and token.draft_status is not DraftStatus.REJECTED:
            self.new_line()

    def new_line(self) -> None:
        self.lines.append([])
        self.column = 0

    def token_at(self, line: int, column: int) -> int | None:
        """Return the index of the token at a position, or of the last one before it; None if there is none."""
        if not 0 <= line < len(self.lines):
            return None
        indices = [placed.index for placed in self.lines[line] if placed.column <= column]
        return indices[-1] if indices else None

    def token_lines_away(self, index: int, lines: int) -> int:
        """Return the index of the token in the same column `lines` further down, or in the last line."""
        line = self.line_of[index]
        column = next((placed.column for placed in self.lines[line] if placed.index == index), 0)
        target = max(0, min(line + lines, len(self.lines) - 1))
        while not self.lines[target]:
            target -= 1
        below = self.token_at(target, column)
        return index if below is None else below


def printable(text: str) -> str:
    """Return a token's text in one line, with signs for white space, control and invisible characters."""
    return "".join(map(_printable_character, text)) or "∅"


def _printable_character(character: str) -> str:
    if character in WHITESPACE_SIGNS:
        return WHITESPACE_SIGNS[character]
    if ord(character) in CONTROL_PICTURES:
        return chr(CONTROL_PICTURES[ord(character)])
    category = unicodedata.category(character)
    if category in ("Mn", "Me"):
        return "◌" + character
    return "�" if category in ("Cf", "Cs", "Co", "Cn", "Zl", "Zp") else character


class Candidates(Widget):
    """Candidates of the selected token: probabilities before and after sampling, and what cut a candidate."""

    DEFAULT_CSS = """
    Candidates { width: 1fr; height: auto; max-height: 60%; text-wrap: nowrap; text-overflow: clip; }
    """

    def __init__(self, text_of: Callable[[int], str]):
        super().__init__()
        self.text_of = text_of
        self.token: AnswerToken | None = None

    def show(self, token: AnswerToken | None) -> None:
        if token is not self.token:
            previous, self.token = self.token, token
            self.refresh(layout=line_count(previous) != line_count(token))

    def render(self) -> Content:
        token, width = self.token, self.size.width
        if token is None:
            return Content.styled("No token yet.", DIM_STYLE)
        head = Content.assemble(
            (f"token {token.number + 1:,} ", DIM_STYLE),
            Content.styled(fit_token_text(token.text, TOKEN_CELLS), "bold"),
            (f"  id {token.id}{DRAFT_LABELS[token.draft_status]}", DIM_STYLE),
        )
        if not token.candidates:
            return Content.assemble(
                head, Content.styled("  (generated while the inspector was closed)", DIM_STYLE)
            )
        bar_width = max((width - TOKEN_CELLS - 2 * PERCENT_CELLS - 7) // 2, 4)
        column_width = bar_width + PERCENT_CELLS + 3
        names = f"{'':{TOKEN_CELLS + 2}}{'the model':<{column_width}}{'after sampling':<{bar_width}}"
        lines = [
            head,
            Content.styled(names, DIM_STYLE),
            *(self.candidate_line(candidate, token, bar_width) for candidate in token.candidates),
        ]
        rest = 1 - sum(math.exp(candidate.logprob) for candidate in token.candidates)
        lines.append(
            Content.styled(
                f"{'  all others':{TOKEN_CELLS + 2}}{format_percent(max(rest, 0.0)):>{PERCENT_CELLS}}", DIM_STYLE
            )
        )
        return Content("\n").join(lines)

    def candidate_line(self, candidate: Candidate, token: AnswerToken, bar_width: int) -> Content:
        probability, chance = math.exp(candidate.logprob), candidate.chance
        is_token = candidate.token_id == token.id
        mark = ("✗ " if token.draft_status is DraftStatus.REJECTED else "▶ ") if is_token else "  "
        name = set_cell_size(fit_token_text(self.text_of(candidate.token_id), TOKEN_CELLS), TOKEN_CELLS)
        if chance > 0:
            after_sampling = Content.assemble(
                f"{format_percent(chance):>{PERCENT_CELLS}} ",
                Content.styled(bar(chance, bar_width), SAMPLED_STYLE),
            )
        else:
            reason = f" cut by {candidate.cut_by}" if candidate.cut_by else f"{format_percent(0):>{PERCENT_CELLS}}"
            after_sampling = Content.styled(reason, DIM_STYLE)
        return Content.assemble(
            Content.styled(mark + name, "bold" if is_token else "" if chance > 0 else DIM_STYLE),
            f"{format_percent(probability):>{PERCENT_CELLS}} ",
            Content.styled(bar(probability, bar_width), MODEL_STYLE if chance > 0 else DIM_STYLE),
            "  ",
            after_sampling,
        )


def format_percent(value: float) -> str:
    """Return a percentage with up to two significant digits after 0."""
    return f"{value:.1%}" if value >= 0.0995 or value == 0 else f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def fit_token_text(text: str, width: int) -> str:
    """Return a token's printable text in at most `width` cells."""
    text = printable(text)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def line_count(token: AnswerToken | None) -> int:
    return len(token.candidates) + 3 if token and token.candidates else 1

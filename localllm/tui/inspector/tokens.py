"""The answer token by token, coloured by how likely the model held each; without colour the unlikely are
underlined and the very unlikely bold as well. Drafts that were right follow a ✓, others are struck through
behind a ✗.
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
from localllm.tui.inspector.record import AnswerRecord, AnswerToken, DraftStatus

# Tokens laid out as text in lines of a given width, with what is not seen made visible. Pure Python.

WHITESPACE_SIGNS = {" ": "·", "\t": "⇥", "\n": "↵"}
DRAFT_MARKS = {DraftStatus.ACCEPTED: "✓", DraftStatus.REJECTED: "✗", DraftStatus.NONE: ""}


def printable(text: str) -> str:
    """One line: white space as signs, and nothing that moves a cursor, turns the writing around or hides."""
    return "".join(map(_printable_character, text)) or "∅"


def _printable_character(character: str) -> str:
    if character in WHITESPACE_SIGNS:
        return WHITESPACE_SIGNS[character]
    if ord(character) in CONTROL_PICTURES:
        return chr(CONTROL_PICTURES[ord(character)])
    kind = unicodedata.category(character)
    if kind in ("Mn", "Me"):
        return "◌" + character
    return "�" if kind in ("Cf", "Cs", "Co", "Cn", "Zl", "Zp") else character


@dataclass(frozen=True)
class PlacedToken:
    """A token, or a part of a long one, on its line."""

    index: int  # in the tokens that were laid out
    column: int
    text: str


class TokenFlow:
    """Lines that grow with the tokens: what is laid out stays where it is until the width changes."""

    def __init__(self, width: int):
        self.width = max(width, 2)
        self.lines: list[list[PlacedToken]] = [[]]
        self.line_of: list[int] = []  # on which each token begins
        self.column = 0
        self.draft_status = DraftStatus.NONE

    def extend(self, tokens: Sequence[AnswerToken]) -> None:
        """The tokens from the first that is not laid out yet."""
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
        """Which token stands there, or last before; None where none does."""
        if not 0 <= line < len(self.lines):
            return None
        before = [placed.index for placed in self.lines[line] if placed.column <= column]
        return before[-1] if before else None

    def token_lines_away(self, index: int, lines: int) -> int:
        """The token so many lines farther on in the same column, as far as there are lines."""
        line = self.line_of[index]
        column = next((placed.column for placed in self.lines[line] if placed.index == index), 0)
        target = max(0, min(line + lines, len(self.lines) - 1))
        while not self.lines[target]:
            target -= 1
        found = self.token_at(target, column)
        return index if found is None else found


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


# What could have come in a token's place: the model's own probabilities, what sampling left of them, and what cut
# the others.

DIM_STYLE, MODEL_STYLE, SAMPLED_STYLE = "$foreground-muted", "$primary", "$success"
DRAFT_LABELS = {
    DraftStatus.NONE: "",
    DraftStatus.ACCEPTED: ", a draft that was right",
    DraftStatus.REJECTED: ", a draft that was rejected",
}
PERCENT_CELLS, TOKEN_CELLS = 6, 14  # columns of a percentage and of a token


def format_percent(value: float) -> str:
    """In percent, with digits where they say something."""
    return f"{value:.1%}" if value >= 0.0995 or value == 0 else f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def fit_token_text(text: str, width: int) -> str:
    """Visible, and cut where it is longer."""
    seen = printable(text)
    return seen if cell_len(seen) <= width else set_cell_size(seen, width - 1) + "…"


def line_count(token: AnswerToken | None) -> int:
    return len(token.candidates) + 3 if token and token.candidates else 1


class Candidates(Widget):
    DEFAULT_CSS = """
    Candidates { width: 1fr; height: auto; max-height: 60%; text-wrap: nowrap; text-overflow: clip; }
    """

    def __init__(self, text_of: Callable[[int], str]):
        super().__init__()
        self.text_of = text_of
        self.token: AnswerToken | None = None

    def show(self, token: AnswerToken | None) -> None:
        if token is not self.token:
            before, self.token = self.token, token
            self.refresh(layout=line_count(before) != line_count(token))

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
            return Content.assemble(head, Content.styled("  (asked for before the inspector was open)", DIM_STYLE))
        room = max((width - TOKEN_CELLS - 2 * PERCENT_CELLS - 7) // 2, 4)
        names = f"{'':{TOKEN_CELLS + 2}}{'the model':<{room + PERCENT_CELLS + 3}}{'after sampling':<{room}}"
        lines = [
            head,
            Content.styled(names, DIM_STYLE),
            *(self.candidate_line(one, token, room) for one in token.candidates),
        ]
        rest = 1 - sum(math.exp(one.logprob) for one in token.candidates)
        lines.append(
            Content.styled(
                f"{'  all others':{TOKEN_CELLS + 2}}{format_percent(max(rest, 0.0)):>{PERCENT_CELLS}}", DIM_STYLE
            )
        )
        return Content("\n").join(lines)

    def candidate_line(self, one: Candidate, token: AnswerToken, room: int) -> Content:
        own = math.exp(one.logprob)
        drawn = one.token_id == token.id
        mark = ("✗ " if token.draft_status is DraftStatus.REJECTED else "▶ ") if drawn else "  "
        name = set_cell_size(fit_token_text(self.text_of(one.token_id), TOKEN_CELLS), TOKEN_CELLS)
        left = Content.styled(
            f" cut by {one.cut_by}" if one.cut_by else f"{format_percent(0):>{PERCENT_CELLS}}", DIM_STYLE
        )
        if one.chance > 0:
            left = Content.assemble(
                f"{format_percent(one.chance):>{PERCENT_CELLS}} ",
                Content.styled(bar(one.chance, room), SAMPLED_STYLE),
            )
        return Content.assemble(
            Content.styled(mark + name, "bold" if drawn else "" if one.chance > 0 else DIM_STYLE),
            f"{format_percent(own):>{PERCENT_CELLS}} ",
            Content.styled(bar(own, room), MODEL_STYLE if one.chance > 0 else DIM_STYLE),
            "  ",
            left,
        )

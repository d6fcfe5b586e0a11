"""Widgets that show the pieces of an answer, one each."""

from typing import Final

from rich import box
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.css.styles import RulesMap
from textual.highlight import highlight
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widgets import Static

from localllm.tui.transcript.markdown import Form, Piece

COLOURED_CHARACTERS: Final = 40_000  # of code; colours of more take longer than they are worth
COLOURED_WHILE_WRITTEN: Final = 3_000


class Hanging(Visual):
    """Text whose first line has something before it that its other lines are indented by."""

    def __init__(self, content: Content, first: str, rest: str):
        self.content, self.first, self.rest = content, first, rest

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return self.content.get_optimal_width(rules, container_width) + len(self.rest)

    def get_height(self, rules: RulesMap, width: int) -> int:
        return self.content.get_height(rules, self.left(width))

    def left(self, width: int) -> int:
        return max(1, width - len(self.rest))

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        strips = self.content.render_strips(self.left(width), height, style, options)
        before = [Segment(text, style.rich_style) for text in (self.first, self.rest)]
        return [Strip([before[y > 0], *strip]) for y, strip in enumerate(strips)]


class Words(Static):
    """A paragraph, an item of a list or a heading."""

    DEFAULT_CSS = """
    Words { height: auto; }
    Words.heading { text-style: bold; }
    """

    def __init__(self, piece: Piece):
        super().__init__(self.visual_of(piece), classes=piece.form)
        self.piece = piece
        self.set_class(piece.is_apart, "apart")

    @staticmethod
    def visual_of(piece: Piece) -> Visual:
        return Hanging(piece.content, piece.first, piece.rest) if piece.rest else piece.content

    def show(self, piece: Piece) -> None:
        self.piece = piece
        self.set_class(piece.is_apart, "apart")
        self.update(self.visual_of(piece))

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        return selection.extract(self.piece.content.plain), "\n"


class Code(Vertical):
    """A block of code: what it is in and what can be done with it above, then the code in its colours."""

    DEFAULT_CSS = """
    Code {
        height: auto;
        .head {
            height: 1; color: $text-muted; padding: 0 1; background: $boost;
            link-style: none; link-color: $text-muted;
        }
        .code { height: auto; padding: 0 1; background: $boost; text-wrap: nowrap; text-overflow: fold; }
        &.chosen > .head { color: $primary; text-style: bold; }
    }
    """

    def __init__(self, piece: Piece):
        super().__init__(classes="apart")
        self.piece = piece
        self.styles.padding = (0, 0, 0, len(piece.rest))
        self.head = Static(self.title, classes="head")
        self.body = Static(self.coloured(COLOURED_WHILE_WRITTEN), classes="code")

    @property
    def title(self) -> Content:
        verbs = [(verb, Style.from_meta({"@click": f"screen.{verb}_code"})) for verb in ("copy", "save")]
        return Content.assemble(self.piece.language or "code", *(part for verb in verbs for part in ("  ", verb)))

    def compose(self) -> ComposeResult:
        yield self.head
        yield self.body

    def show(self, piece: Piece) -> None:
        if piece.language != self.piece.language:
            self.piece = piece
            self.head.update(self.title)
        self.piece = piece
        self.body.update(self.coloured(COLOURED_WHILE_WRITTEN))

    def settle(self) -> None:
        """It will not change any more: all of it may take its colours."""
        if len(self.piece.content) > COLOURED_WHILE_WRITTEN:
            self.body.update(self.coloured(COLOURED_CHARACTERS))

    def coloured(self, most: int) -> Content:
        code = self.piece.content.plain
        if not self.piece.language or len(code) > most:
            return self.piece.content
        return highlight(code, language=self.piece.language)


class Grid(Static):
    """A table."""

    DEFAULT_CSS = """
    Grid { height: auto; }
    """

    def __init__(self, piece: Piece):
        super().__init__(self.table(piece), classes="apart")
        self.piece = piece

    @staticmethod
    def table(piece: Piece) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        heads, *rows = piece.rows
        for head in heads:
            table.add_column(rich_text(head))
        for row in rows:
            table.add_row(*map(rich_text, row))
        return table

    def show(self, piece: Piece) -> None:
        self.piece = piece
        self.update(self.table(piece))


class Rule(Static):
    DEFAULT_CSS = """
    Rule { height: 1; color: $text-disabled; }
    """

    def __init__(self, piece: Piece):
        super().__init__("─" * 24, classes="apart", markup=False)
        self.piece = piece

    def show(self, piece: Piece) -> None:
        self.piece = piece


WIDGETS: Final = {Form.TEXT: Words, Form.HEADING: Words, Form.CODE: Code, Form.TABLE: Grid, Form.RULE: Rule}
PieceWidget = Words | Code | Grid | Rule


def widget_for(piece: Piece) -> PieceWidget:
    return WIDGETS[piece.form](piece)


def rich_text(content: Content) -> Text:
    """With the styles that Rich knows as well; colours of the theme and clicks are left out."""
    text = Text(content.plain)
    for start, end, style in content.spans:
        if style in ("bold", "italic", "strike"):
            text.stylize(str(style), start, end)
    return text

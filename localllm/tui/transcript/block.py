"""A piece of an answer as lines of a width."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rich import box
from rich.segment import Segment
from rich.style import Style as RichStyle
from rich.table import Table
from rich.text import Text
from textual.content import Content
from textual.highlight import highlight
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual

from localllm.tui.transcript.markdown import MarkdownPiece, PieceType

MAX_HIGHLIGHTED: Final = 40_000  # of code; colours of more take longer than they are worth
MAX_HIGHLIGHTED_LIVE: Final = 2_000
RULE_CELLS = 24
CODE_HEAD_STYLE, SELECTED_STYLE, CODE_BACKGROUND, HEADING_STYLE = "dim", "bold $primary", "on $surface", "bold"


class Block:
    """place: of a block of code among those of its answer."""

    def __init__(self, piece: MarkdownPiece, place: int):
        self.piece = piece
        self.code_index = place
        self.is_selected = False
        self.content = self.highlighted(MAX_HIGHLIGHTED_LIVE)
        self.strips: list[Strip] = []
        self.render_key: object = None  # what `strips` depend on besides the piece

    @property
    def is_code(self) -> bool:
        return self.piece.piece_type == PieceType.CODE

    @property
    def text(self) -> str:
        """What of it can be selected."""
        return self.piece.content.plain

    @property
    def height(self) -> int:
        return len(self.strips)

    def settle(self) -> None:
        """It will not change any more: all of a block of code may take its colours."""
        if self.is_code and len(self.piece.content) > MAX_HIGHLIGHTED_LIVE:
            self.content, self.render_key = self.highlighted(MAX_HIGHLIGHTED), None

    def highlighted(self, max_characters: int) -> Content:
        code, language = self.piece.content.plain, self.piece.language
        if not self.is_code or not language or len(code) > max_characters:
            return self.piece.content
        return highlight(code, language=language)

    def select(self, is_selected: bool) -> None:
        self.is_selected, self.render_key = is_selected, None

    def render(
        self, width: int, style: Style, options: RenderOptions, line: int, table: Callable[[Table], Visual]
    ) -> list[Strip]:
        """line: the number of its first line in the text of the answer, by which what is selected is found."""
        piece = self.piece
        if piece.piece_type == PieceType.CODE:
            return self.render_code(width, style, options, line)
        left = max(1, width - len(piece.rest))
        if piece.piece_type == PieceType.TABLE:
            strips = table(to_rich_table(piece)).render_strips(left, None, style, options)
        elif piece.piece_type == PieceType.RULE:
            strips = [Strip([Segment("─" * min(RULE_CELLS, left), (style + options.get_style("dim")).rich_style)])]
        else:
            shown = style + options.get_style(HEADING_STYLE) if piece.piece_type == PieceType.HEADING else style
            strips = shift_offsets(self.content.render_strips(left, None, shown, options), line)
        before = [Segment(text, style.rich_style) for text in (piece.first, piece.rest)]
        return [Strip([before[y > 0], *strip]) for y, strip in enumerate(strips)]

    def render_code(self, width: int, style: Style, options: RenderOptions, line: int) -> list[Strip]:
        """What it is in and what can be done with it, then the code; lines that are too long go on in the next."""
        indent = Segment(" " * len(self.piece.rest), style.rich_style)
        left = max(4, width - len(self.piece.rest))
        ground = style + options.get_style(CODE_BACKGROUND)
        verbs = [
            (verb, Style.from_meta({"@click": f"screen.{verb}_code({self.code_index})"}))
            for verb in ("copy", "save")
        ]
        parts = [part for verb in verbs for part in ("  ", verb)]
        head = Content.assemble(self.piece.language or "code", *parts).stylize(
            SELECTED_STYLE if self.is_selected else CODE_HEAD_STYLE
        )
        folded = replace(options, rules={"text_wrap": "nowrap", "text_overflow": "fold"})
        strips = [
            *head.render_strips(left - 2, 1, ground, replace(options, selection=None)),
            *shift_offsets(self.content.render_strips(left - 2, None, ground, folded), line),
        ]
        margin = Segment(" ", ground.rich_style)
        return [
            Strip([indent, margin, *strip.extend_cell_length(left - 1, ground.rich_style)]) for strip in strips
        ]


def shift_offsets(strips: list[Strip], line: int) -> list[Strip]:
    """Lines that know where in the answer they stand, where they knew it of their piece."""
    if not line:
        return strips
    return [Strip([_shift_offset(segment, line) for segment in strip], strip.cell_length) for strip in strips]


def _shift_offset(segment: Segment, line: int) -> Segment:
    style = segment.style
    if style is None or "offset" not in (meta := style.meta):
        return segment
    x, y = meta["offset"]
    return Segment(segment.text, style + RichStyle.from_meta({"offset": (x, y + line)}), segment.control)


def to_rich_table(piece: MarkdownPiece) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    heads, *rows = piece.rows
    for head in heads:
        table.add_column(to_rich_text(head))
    for row in rows:
        table.add_row(*map(to_rich_text, row))
    return table


def to_rich_text(content: Content) -> Text:
    """With the styles that Rich knows as well; colours of the theme and clicks are left out."""
    text = Text(content.plain)
    for start, end, style in content.spans:
        if style in ("bold", "italic", "strike"):
            text.stylize(str(style), start, end)
    return text

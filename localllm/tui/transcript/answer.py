"""An answer as Markdown, which may still be growing: of each new text only the end is read again.

One widget for all of it: Textual's own has one for each item of a list, and takes a tenth of a second to lay out a
list that a model is still writing.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Final

from rich import box
from rich.segment import Segment
from rich.style import Style as RichStyle
from rich.table import Table
from rich.text import Text
from textual.content import Content
from textual.geometry import Offset, Region, Size
from textual.highlight import highlight
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual, visualize
from textual.widget import Widget

from localllm.tui.transcript.markdown import MarkdownPiece, PieceType, split_markdown

# A piece of an answer as lines of a width.

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


class Answer(Widget):
    DEFAULT_CSS = "Answer { width: 1fr; height: auto; }"

    def __init__(self, source: str):
        super().__init__()
        self.source = ""
        self.blocks: list[Block] = []
        self.settled_blocks = self.settled_characters = (
            0  # blocks that no later text changes, and the characters that they are made of
        )
        self.block_lines: list[int] = []  # the line above each block
        self.height = 0
        if source:
            self.update_source(source)

    @property
    def code_blocks(self) -> list[Block]:
        return [block for block in self.blocks if block.is_code]

    # What it says

    def update_source(self, source: str) -> None:
        """source: the whole answer as far as it came, which begins with what is shown."""
        self.source = source
        first, height, width = self.settled_blocks, self.height, self.size.width
        pieces, settled, read = split_markdown(source[self.settled_characters :])
        self.replace_unsettled(pieces)
        for block in self.blocks[first : first + settled]:
            block.settle()
        self.settled_blocks += settled
        self.settled_characters += read
        if width:
            self.layout_blocks(width)
        if width and self.height == height:  # all else stays where it is
            line = self.block_lines[first]
            self.refresh(Region(0, line, width, height - line))
        else:
            self.refresh(layout=True)

    def finish(self) -> None:
        """No more comes: an address that was given at the end is known to the text before it."""
        if "]:" in self.source:
            self.settled_blocks = self.settled_characters = 0
            self.update_source(self.source)
        for block in self.blocks[self.settled_blocks :]:
            block.settle()
        self.refresh(layout=True)

    def replace_unsettled(self, pieces: list[MarkdownPiece]) -> None:
        """These in place of those that are not settled; what stays the same is left alone."""
        old = self.blocks[self.settled_blocks :]
        del self.blocks[self.settled_blocks :]
        codes = len(self.code_blocks)
        for place, piece in enumerate(pieces):
            same = place < len(old) and old[place].piece.looks_like(piece)
            block = old[place] if same else Block(piece, codes)
            codes += block.is_code
            self.blocks.append(block)

    def select_code(self, place: int | None) -> None:
        for block in self.code_blocks:
            block.select(block.code_index == place)
        self.refresh()

    # Its lines

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self.layout_blocks(width)
        return self.height

    def layout_blocks(self, width: int) -> None:
        """Bring the lines of all blocks up to date."""
        style, line, heights = self.visual_style, 0, list[int]()
        for place, block in enumerate(self.blocks):
            drawn_for = (width, style, line, self.app.theme)
            if block.render_key != drawn_for:
                block.strips = self.render_block(block, width, style, line, None)
                block.render_key = drawn_for
            line += block.text.count("\n") + 1
            heights.append(block.height + (place > 0 and block.piece.is_apart))
        *self.block_lines, self.height = accumulate(heights, initial=0)

    def render_block(
        self, block: Block, width: int, style: Style, line: int, selection: Selection | None
    ) -> list[Strip]:
        marked = Style.from_styles(self.screen.get_component_styles("screen--selection")) if selection else None
        options = RenderOptions(self._get_style, {}, selection, marked)
        return block.render(width, style, options, line, lambda table: visualize(self, table))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if not self.blocks or any(block.render_key is None for block in self.blocks[self.settled_blocks - 1 :]):
            self.layout_blocks(width)
        place = bisect_right(self.block_lines, y) - 1
        block = self.blocks[place]
        y -= self.block_lines[place] + (place > 0 and block.piece.is_apart)
        strips = block.strips
        if self.text_selection:
            line = sum(block.text.count("\n") + 1 for block in self.blocks[:place])
            strips = self.render_block(
                block, width, self.visual_style, line, block_selection(self.text_selection, line, block)
            )
        style = self.visual_style.rich_style
        return strips[y].extend_cell_length(width, style) if 0 <= y < len(strips) else Strip.blank(width, style)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        return selection.extract("\n".join(block.text for block in self.blocks)), "\n"


def block_selection(selection: Selection, line: int, block: Block) -> Selection | None:
    """Of what is selected in the answer the part in a block that begins at this line of the text."""
    start, end = selection
    lines = block.text.count("\n") + 1
    if (start and start.y >= line + lines) or (end and end.y < line):
        return None
    return Selection(
        Offset(start.x, start.y - line) if start and start.y >= line else None,
        Offset(end.x, end.y - line) if end and end.y < line + lines else None,
    )

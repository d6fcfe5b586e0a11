"""The widget of an answer in Markdown that may still be growing; new text re-parses only its end.

`markdown.py` says why it is not Textual's own widget.
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

MAX_HIGHLIGHTED: Final = 40_000  # characters of a code block; highlighting a longer one is too slow
MAX_HIGHLIGHTED_LIVE: Final = 2_000  # while it is growing
RULE_CELLS = 24
CODE_HEAD_STYLE, SELECTED_STYLE, CODE_BACKGROUND, HEADING_STYLE = "dim", "bold $primary", "on $surface", "bold"


class Block:
    """A piece of Markdown and its rendered lines."""

    def __init__(self, piece: MarkdownPiece, code_index: int):
        """code_index: number of a code block within its answer, from 0"""
        self.piece = piece
        self.code_index = code_index
        self.is_selected = False
        self.content = self.highlighted(MAX_HIGHLIGHTED_LIVE)
        self.strips: list[Strip] = []
        self.render_key: object = None  # width, style, line and theme that `strips` were rendered for

    @property
    def is_code(self) -> bool:
        return self.piece.piece_type == PieceType.CODE

    @property
    def text(self) -> str:
        """The text that can be selected."""
        return self.piece.content.plain

    @property
    def height(self) -> int:
        return len(self.strips)

    def settle(self) -> None:
        """Highlight the whole of a long code block, which will not change any more."""
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
        """Return the lines at a width in cells. line: number of the first one in the answer, for selections"""
        piece = self.piece
        if piece.piece_type == PieceType.CODE:
            return self.render_code(width, style, options, line)
        text_width = max(1, width - len(piece.rest))
        if piece.piece_type == PieceType.TABLE:
            strips = table(to_rich_table(piece)).render_strips(text_width, None, style, options)
        elif piece.piece_type == PieceType.RULE:
            dim = (style + options.get_style("dim")).rich_style
            strips = [Strip([Segment("─" * min(RULE_CELLS, text_width), dim)])]
        else:
            text_style = (
                style + options.get_style(HEADING_STYLE) if piece.piece_type == PieceType.HEADING else style
            )
            strips = shift_offsets(self.content.render_strips(text_width, None, text_style, options), line)
        return prefix_lines(strips, piece.first, piece.rest, style)

    def render_code(self, width: int, style: Style, options: RenderOptions, line: int) -> list[Strip]:
        """Return a line with the language and links to copy and save, then the code, with long lines folded."""
        indent = Segment(" " * len(self.piece.rest), style.rich_style)
        text_width = max(4, width - len(self.piece.rest))
        background = style + options.get_style(CODE_BACKGROUND)
        links = [
            (verb, Style.from_meta({"@click": f"screen.{verb}_code({self.code_index})"}))
            for verb in ("copy", "save")
        ]
        parts = [part for link in links for part in ("  ", link)]
        head = Content.assemble(self.piece.language or "code", *parts).stylize(
            SELECTED_STYLE if self.is_selected else CODE_HEAD_STYLE
        )
        folded = replace(options, rules={"text_wrap": "nowrap", "text_overflow": "fold"})
        strips = [
            *head.render_strips(text_width - 2, 1, background, replace(options, selection=None)),
            *shift_offsets(self.content.render_strips(text_width - 2, None, background, folded), line),
        ]
        margin = Segment(" ", background.rich_style)
        return [
            Strip([indent, margin, *strip.extend_cell_length(text_width - 1, background.rich_style)])
            for strip in strips
        ]


class Answer(Widget):
    """Shows `source` as blocks of Markdown. Blocks before the last one are settled: no later text changes them."""

    DEFAULT_CSS = "Answer { width: 1fr; height: auto; }"

    def __init__(self, source: str):
        super().__init__()
        self.source = ""
        self.blocks: list[Block] = []
        self.settled_blocks = self.settled_characters = 0  # the latter is the length of their source
        self.block_lines: list[int] = []  # first line of each block
        self.height = 0
        if source:
            self.update_source(source)

    @property
    def code_blocks(self) -> list[Block]:
        return [block for block in self.blocks if block.is_code]

    # Text

    def update_source(self, source: str) -> None:
        """Show the answer so far, which must begin with the current source."""
        self.source = source
        first, height, width = self.settled_blocks, self.height, self.size.width
        pieces, settled, settled_characters = split_markdown(source[self.settled_characters :])
        self.replace_unsettled(pieces)
        for block in self.blocks[first : first + settled]:
            block.settle()
        self.settled_blocks += settled
        self.settled_characters += settled_characters
        if width:
            self.layout_blocks(width)
        if width and self.height == height:  # other widgets stay where they are
            line = self.block_lines[first]
            self.refresh(Region(0, line, width, height - line))
        else:
            self.refresh(layout=True)

    def finish(self) -> None:
        """Render the final state. A link definition at the end may change earlier text, so all is parsed again."""
        if "]:" in self.source:
            self.settled_blocks = self.settled_characters = 0
            self.update_source(self.source)
        for block in self.blocks[self.settled_blocks :]:
            block.settle()
        self.refresh(layout=True)

    def replace_unsettled(self, pieces: list[MarkdownPiece]) -> None:
        """Replace the blocks that are not settled, and keep those that have not changed."""
        previous = self.blocks[self.settled_blocks :]
        del self.blocks[self.settled_blocks :]
        code_count = len(self.code_blocks)
        for i, piece in enumerate(pieces):
            unchanged = i < len(previous) and previous[i].piece.looks_like(piece)
            block = previous[i] if unchanged else Block(piece, code_count)
            code_count += block.is_code
            self.blocks.append(block)

    def select_code(self, index: int | None) -> None:
        for block in self.code_blocks:
            block.select(block.code_index == index)
        self.refresh()

    # Lines

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self.layout_blocks(width)
        return self.height

    def layout_blocks(self, width: int) -> None:
        """Render blocks whose width, style, position or theme has changed, and compute the lines of all."""
        style, line, heights = self.visual_style, 0, list[int]()
        for i, block in enumerate(self.blocks):
            render_key = (width, style, line, self.app.theme)
            if block.render_key != render_key:
                block.strips = self.render_block(block, width, style, line, None)
                block.render_key = render_key
            line += block.text.count("\n") + 1
            heights.append(block.height + (i > 0 and block.piece.is_apart))
        *self.block_lines, self.height = accumulate(heights, initial=0)

    def render_block(
        self, block: Block, width: int, style: Style, line: int, selection: Selection | None
    ) -> list[Strip]:
        selection_style = None
        if selection:
            selection_style = Style.from_styles(self.screen.get_component_styles("screen--selection"))
        options = RenderOptions(self._get_style, {}, selection, selection_style)
        return block.render(width, style, options, line, lambda table: visualize(self, table))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if not self.blocks or any(block.render_key is None for block in self.blocks[self.settled_blocks - 1 :]):
            self.layout_blocks(width)
        index = bisect_right(self.block_lines, y) - 1
        block = self.blocks[index]
        y -= self.block_lines[index] + (index > 0 and block.piece.is_apart)
        strips = block.strips
        if self.text_selection:
            line = sum(block.text.count("\n") + 1 for block in self.blocks[:index])
            strips = self.render_block(
                block, width, self.visual_style, line, block_selection(self.text_selection, line, block)
            )
        style = self.visual_style.rich_style
        return strips[y].extend_cell_length(width, style) if 0 <= y < len(strips) else Strip.blank(width, style)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        return selection.extract("\n".join(block.text for block in self.blocks)), "\n"


def block_selection(selection: Selection, line: int, block: Block) -> Selection | None:
    """Return the part of a selection in the answer that lies in the block that begins at `line`, None if none
    does.
    """
    start, end = selection
    lines = block.text.count("\n") + 1
    if (start and start.y >= line + lines) or (end and end.y < line):
        return None
    return Selection(
        Offset(start.x, start.y - line) if start and start.y >= line else None,
        Offset(end.x, end.y - line) if end and end.y < line + lines else None,
    )


def prefix_lines(strips: list[Strip], first: str, rest: str, style: Style) -> list[Strip]:
    """Return lines with `first` before the first one, and `rest` before all others."""
    prefixes = [Segment(text, style.rich_style) for text in (first, rest)]
    return [Strip([prefixes[y > 0], *strip]) for y, strip in enumerate(strips)]


def shift_offsets(strips: list[Strip], line: int) -> list[Strip]:
    """Turn the text offsets in lines, relative to a block, into offsets in the answer whose line `line` it begins
    at.
    """
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
    headers, *rows = piece.rows
    for header in headers:
        table.add_column(to_rich_text(header))
    for row in rows:
        table.add_row(*map(to_rich_text, row))
    return table


def to_rich_text(content: Content) -> Text:
    """Return content as Rich text, with emphasis and without theme colours and links."""
    text = Text(content.plain)
    for start, end, style in content.spans:
        if style in ("bold", "italic", "strike"):
            text.stylize(str(style), start, end)
    return text

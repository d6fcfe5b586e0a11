"""An answer as Markdown, which may still be growing: of each new text only the end is read again.

One widget for all of it: Textual's own has one for each item of a list, and takes a tenth of a second to lay out a
list that a model is still writing.
"""

from bisect import bisect_right
from itertools import accumulate

from textual.geometry import Offset, Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, visualize
from textual.widget import Widget

from localllm.tui.transcript.block import Block
from localllm.tui.transcript.markdown import MarkdownPiece, split_markdown


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

"""The blocks of the KV cache that hold the conversation."""

from typing import Protocol, runtime_checkable

from textual.content import Content

from localllm.conversation.model import Model
from localllm.formatting import format_bytes, format_moves
from localllm.metrics import EngineStats, StepReport
from localllm.tui.drawing import LineWidget, bar
from localllm.tui.inspector.record import AnswerRecord
from localllm.tui.inspector.timeline import DIM_STYLE, NO_STEPS_TEXT, Cell, paint_cells

HEADING = "Blocks of the KV cache; cached blocks are not computed again."
CACHED_CELL, PROMPT_CELL, ANSWER_CELL, FREE_CELL = (
    ("▒", "$success"),
    ("▓", "$primary"),
    ("█", "$accent"),
    ("·", DIM_STYLE),
)
OTHER_LINES = 6  # besides the grid


@runtime_checkable
class ReportsStats(Protocol):
    def stats(self) -> EngineStats: ...


class Blocks(LineWidget, can_focus=True):
    """A grid of the blocks, and how much of the pool is in use."""

    def __init__(self, record: AnswerRecord, model: Model):
        super().__init__(id="blocks")
        self.record = record
        self.model = model

    def show(self, record: AnswerRecord) -> None:
        self.record = record
        self.refresh()

    def lines(self) -> list[Content]:
        newest, width = self.record.newest, self.size.width
        stats = self.model.stats() if isinstance(self.model, ReportsStats) else None
        moves = format_moves(stats.moves) if stats else ""
        height = max(self.size.height - OTHER_LINES - bool(moves), 1)
        lines = [Content.styled(HEADING, DIM_STYLE), self.count_line(newest), Content()]
        lines += block_grid(newest, self.model.context, self.model.block_tokens, width, height)
        lines += [Content(), self.legend()]
        if stats:
            lines.append(self.pool_line(stats))
        if moves:
            lines.append(Content.styled(f"moved {moves}", DIM_STYLE))
        return lines

    def count_line(self, newest: StepReport | None) -> Content:
        if newest is None:
            return Content.styled(NO_STEPS_TEXT, DIM_STYLE)
        size = format_bytes(self.model.reads.kept_per_token * newest.computed)
        tokens = f"{newest.computed:,} of {self.model.context:,} tokens"
        return Content(f"{newest.blocks:,} blocks of {self.model.block_tokens} tokens, {tokens}, {size}")

    def legend(self) -> Content:
        parts = (
            (CACHED_CELL, "cached"),
            (PROMPT_CELL, "prompt"),
            (ANSWER_CELL, "answer"),
            (FREE_CELL, "free"),
        )
        return Content("  ").join(
            Content.assemble(Content.styled(sign, style), " ", (name, DIM_STYLE)) for (sign, style), name in parts
        )

    def pool_line(self, stats: EngineStats) -> Content:
        """Return the use of the pool by all requests, and its cached blocks."""
        used = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        counts = f" {stats.used_blocks:,} of {stats.blocks:,} blocks in use, {stats.cached_blocks:,} cached"
        for tier, tokens in (("host memory", stats.host_tokens), ("disk", stats.disk_tokens)):
            counts += f", {tokens:,} tokens from {tier}" if tokens else ""
        return Content.assemble(
            ("pool ", DIM_STYLE), Content.styled(bar(used, 16, "░"), "$primary"), (counts, DIM_STYLE)
        )


def block_grid(
    newest: StepReport | None, context: int, block_tokens: int, width: int, height: int
) -> list[Content]:
    """Return a grid of all blocks of the context, as large as fits; if there are too many, a cell is several
    blocks.
    """
    tokens, block_count = block_tokens, -(-context // block_tokens)
    sizes = ((4, 2), (2, 2), (2, 1), (1, 1))  # cells per block, and lines per row
    fitting = (size for size in sizes if row_count(block_count, width, size[0]) * size[1] <= height)
    block_width, row_height = next(fitting, sizes[-1])
    while row_count(-(-context // tokens), width, block_width) > height - (tokens > block_tokens):
        tokens += block_tokens
    row_length = max((width + 1) // (block_width + 1), 1)
    blocks = [block_cells(begin, tokens, block_width, newest) for begin in range(0, context, tokens)]
    lines: list[Content] = []
    for start in range(0, len(blocks), row_length):
        row = [cell for block in blocks[start : start + row_length] for cell in (*block, (" ", block[-1][1]))]
        lines += [paint_cells(row), *[Content()] * (row_height - 1)]
    if tokens > block_tokens:
        lines.append(Content.styled(f"each cell is {tokens // block_tokens} blocks", DIM_STYLE))
    return lines


def row_count(block_count: int, width: int, block_width: int) -> int:
    return -(-block_count // max((width + 1) // (block_width + 1), 1))


def block_cells(begin: int, tokens: int, width: int, newest: StepReport | None) -> list[Cell]:
    """Return the cells of a block that begins with token `begin`, by its contents and how full it is."""
    filled = min(newest.computed - begin, tokens) if newest else 0
    if newest is None or filled <= 0:
        character, style = FREE_CELL
        return [(cell, style) for cell in character.center(width)]
    character, style = (
        CACHED_CELL if begin + filled <= newest.found else PROMPT_CELL if begin < newest.prompt else ANSWER_CELL
    )
    cells = bar(filled / tokens, width, "░").replace("█", character)
    return [(cell, style) for cell in cells]

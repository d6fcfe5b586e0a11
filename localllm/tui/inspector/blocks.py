"""The blocks of the KV cache that hold the conversation, filling one by one."""

from typing import Protocol, runtime_checkable

from textual.content import Content

from localllm.formatting import format_bytes
from localllm.metrics import EngineStats, StepReport
from localllm.protocol.model import Model
from localllm.tui.drawing import LineWidget, bar
from localllm.tui.inspector.lanes import DIM_STYLE, Cell, paint_cells
from localllm.tui.inspector.record import AnswerRecord

HEADING = "Keys and values so far, block by block; a found one is not computed again."
CACHED_CELL, PROMPT_CELL, ANSWER_CELL, FREE_CELL = (
    ("▒", "$success"),
    ("▓", "$primary"),
    ("█", "$accent"),
    ("·", DIM_STYLE),
)
OTHER_LINES = 6  # beside the grid


@runtime_checkable
class ReportsStats(Protocol):
    def stats(self) -> EngineStats: ...


class Blocks(LineWidget, can_focus=True):
    def __init__(self, record: AnswerRecord, model: Model):
        super().__init__(id="blocks")
        self.record = record
        self.model = model

    def show(self, record: AnswerRecord) -> None:
        self.record = record
        self.refresh()

    def lines(self) -> list[Content]:
        newest, width = self.record.newest, self.size.width
        lines = [Content.styled(HEADING, DIM_STYLE), self.count_line(newest), Content()]
        lines += block_grid(
            newest, self.model.context, self.model.block_tokens, width, max(self.size.height - OTHER_LINES, 1)
        )
        lines += [Content(), self.legend()]
        if isinstance(self.model, ReportsStats):
            lines.append(self.pool_line(self.model.stats()))
        return lines

    def count_line(self, newest: StepReport | None) -> Content:
        if newest is None:
            return Content.styled("Nothing was reported yet: ask something.", DIM_STYLE)
        reads = self.model.reads
        kept = f", {format_bytes(reads.kept_per_token * newest.computed)}" if reads else ""
        room = f"{newest.computed:,} of {self.model.context:,} tokens"
        return Content(f"{newest.blocks:,} blocks of {self.model.block_tokens} tokens, {room}{kept}")

    def legend(self) -> Content:
        parts = (
            (CACHED_CELL, "found in the cache"),
            (PROMPT_CELL, "prompt, computed"),
            (ANSWER_CELL, "answer"),
            (FREE_CELL, "free"),
        )
        return Content("  ").join(
            Content.assemble(Content.styled(sign, style), " ", (name, DIM_STYLE)) for (sign, style), name in parts
        )

    def pool_line(self, stats: EngineStats) -> Content:
        """Of all requests, and of texts that later ones may find."""
        share = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        told = f" {stats.used_blocks:,} of {stats.blocks:,} in use, {stats.cached_blocks:,} can be found"
        return Content.assemble(
            ("pool ", DIM_STYLE), Content.styled(bar(share, 16, "░"), "$primary"), (told, DIM_STYLE)
        )


def block_grid(
    newest: StepReport | None, context: int, block_tokens: int, width: int, height: int
) -> list[Content]:
    """A cell for each block of the context, as large as there is room; where there is too little, for several."""
    tokens, blocks = block_tokens, -(-context // block_tokens)
    sizes = ((4, 2), (2, 2), (2, 1), (1, 1))  # columns of a cell, and the lines from one row to the next
    fitting = (one for one in sizes if row_count(blocks, width, one[0]) * one[1] <= height)
    wide, tall = next(fitting, sizes[-1])
    while row_count(-(-context // tokens), width, wide) > height - (tokens > block_tokens):
        tokens += block_tokens
    across = max((width + 1) // (wide + 1), 1)
    cells = [block_cells(begin, tokens, wide, newest) for begin in range(0, context, tokens)]
    lines: list[Content] = []
    for start in range(0, len(cells), across):
        row = [part for one in cells[start : start + across] for part in (*one, (" ", one[-1][1]))]
        lines += [paint_cells(row), *[Content()] * (tall - 1)]
    if tokens > block_tokens:
        lines.append(Content.styled(f"each sign stands for {tokens // block_tokens} blocks", DIM_STYLE))
    return lines


def row_count(cells: int, width: int, wide: int) -> int:
    return -(-cells // max((width + 1) // (wide + 1), 1))


def block_cells(begin: int, tokens: int, wide: int, newest: StepReport | None) -> list[Cell]:
    """The block that begins with the token `begin`: whose it is, and how full."""
    filled = min(newest.computed - begin, tokens) if newest else 0
    if newest is None or filled <= 0:
        sign, style = FREE_CELL
        return [(character, style) for character in sign.center(wide)]
    sign, style = (
        CACHED_CELL if begin + filled <= newest.found else PROMPT_CELL if begin < newest.prompt else ANSWER_CELL
    )
    full = bar(filled / tokens, wide, "░").replace("█", sign)
    return [(character, style) for character in full]

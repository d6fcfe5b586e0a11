"""The blocks of the KV cache that hold the conversation, filling one by one."""

from typing import Protocol, runtime_checkable

from textual.content import Content

from localllm.inspection import StepReport
from localllm.metrics import EngineStats
from localllm.model import Model
from localllm.tui.inspector.drawn import Drawn
from localllm.tui.inspector.lanes import DIM, Cell, painted
from localllm.tui.inspector.record import Record
from localllm.tui.sparkline import bar
from localllm.units import size

ABOUT = "Keys and values so far, block by block; a found one is not computed again."
FOUND, PROMPT, ANSWER, FREE = ("▒", "$success"), ("▓", "$primary"), ("█", "$accent"), ("·", DIM)
LINES = 6  # beside the grid


@runtime_checkable
class Counted(Protocol):
    def stats(self) -> EngineStats: ...


class Blocks(Drawn, can_focus=True):
    def __init__(self, record: Record, model: Model):
        super().__init__(id="blocks")
        self.record = record
        self.model = model

    def show(self, record: Record) -> None:
        self.record = record
        self.refresh()

    def lines(self) -> list[Content]:
        newest, width = self.record.newest, self.size.width
        lines = [Content.styled(ABOUT, DIM), self.counts(newest), Content()]
        lines += grid(newest, self.model.context, self.model.block_tokens, width, max(self.size.height - LINES, 1))
        lines += [Content(), self.legend()]
        if isinstance(self.model, Counted):
            lines.append(self.pool(self.model.stats()))
        return lines

    def counts(self, newest: StepReport | None) -> Content:
        if newest is None:
            return Content.styled("Nothing was reported yet: ask something.", DIM)
        reads = self.model.reads
        kept = f", {size(reads.kept_per_token * newest.computed)}" if reads else ""
        room = f"{newest.computed:,} of {self.model.context:,} tokens"
        return Content(f"{newest.blocks:,} blocks of {self.model.block_tokens} tokens, {room}{kept}")

    def legend(self) -> Content:
        parts = ((FOUND, "found in the cache"), (PROMPT, "prompt, computed"), (ANSWER, "answer"), (FREE, "free"))
        return Content("  ").join(
            Content.assemble(Content.styled(sign, style), " ", (name, DIM)) for (sign, style), name in parts
        )

    def pool(self, stats: EngineStats) -> Content:
        """Of all requests, and of texts that later ones may find."""
        share = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        told = f" {stats.used_blocks:,} of {stats.blocks:,} in use, {stats.cached_blocks:,} can be found"
        return Content.assemble(("pool ", DIM), Content.styled(bar(share, 16, "░"), "$primary"), (told, DIM))


def grid(newest: StepReport | None, context: int, block_tokens: int, width: int, height: int) -> list[Content]:
    """A cell for each block of the context, as large as there is room; where there is too little, for several."""
    tokens, blocks = block_tokens, -(-context // block_tokens)
    sizes = ((4, 2), (2, 2), (2, 1), (1, 1))  # columns of a cell, and the lines from one row to the next
    fitting = (one for one in sizes if rows_of(blocks, width, one[0]) * one[1] <= height)
    wide, tall = next(fitting, sizes[-1])
    while rows_of(-(-context // tokens), width, wide) > height - (tokens > block_tokens):
        tokens += block_tokens
    across = max((width + 1) // (wide + 1), 1)
    cells = [drawn(begin, tokens, wide, newest) for begin in range(0, context, tokens)]
    lines: list[Content] = []
    for start in range(0, len(cells), across):
        row = [part for one in cells[start : start + across] for part in (*one, (" ", one[-1][1]))]
        lines += [painted(row), *[Content()] * (tall - 1)]
    if tokens > block_tokens:
        lines.append(Content.styled(f"each sign stands for {tokens // block_tokens} blocks", DIM))
    return lines


def rows_of(cells: int, width: int, wide: int) -> int:
    return -(-cells // max((width + 1) // (wide + 1), 1))


def drawn(begin: int, tokens: int, wide: int, newest: StepReport | None) -> list[Cell]:
    """The block that begins with the token `begin`: whose it is, and how full."""
    filled = min(newest.computed - begin, tokens) if newest else 0
    if newest is None or filled <= 0:
        sign, style = FREE
        return [(character, style) for character in sign.center(wide)]
    sign, style = FOUND if begin + filled <= newest.found else PROMPT if begin < newest.prompt else ANSWER
    full = bar(filled / tokens, wide, "░").replace("█", sign)
    return [(character, style) for character in full]

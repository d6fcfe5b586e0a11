"""Two lines of numbers with fixed columns: what stands where depends on width and model, not on the numbers.

Where there is little room, the least important numbers are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from localllm.tui.metrics.live import Numbers, Phase
from localllm.tui.sparkline import bar, nice_top, sparkline
from localllm.units import rate, seconds, size

GAP = "  "
LABEL = "$foreground-muted"
WIDE = 110  # columns from which labels are written out
LEAST_TICKS = 8


@dataclass(frozen=True)
class Cell:
    label: str
    value: str
    width: int  # that the value may take
    rank: int = 0  # the highest are left out first
    after: str = ""
    style: str = ""
    left: bool = False  # where the value stands in its width

    @property
    def cells(self) -> int:
        return len(self.label) + bool(self.label) + self.width + len(self.after)

    @property
    def content(self) -> Content:
        value = self.value.ljust(self.width) if self.left else self.value.rjust(self.width)
        space = " " if self.label else ""
        label, after = Content.styled(self.label + space, LABEL), Content.styled(self.after, LABEL)
        return Content.assemble(label, Content.styled(value, self.style), after)


def lines(numbers: Numbers, context: int, width: int) -> Content:
    first = reading(numbers, width) if numbers.phase in (Phase.WAITING, Phase.READING) else speed(numbers, width)
    return Content("\n").join([first, memory(numbers, context, width)])


def speed(numbers: Numbers, width: int) -> Content:
    metrics, wide = numbers.metrics, width >= WIDE
    now, mean = rate(numbers.now_per_s), rate(metrics.tokens_per_s).removesuffix(" tokens/s")
    cells = [
        Cell("TTFT", seconds(metrics.ttft_s), 7, 3),
        Cell("now" if wide else "", now, 14, style="bold"),
        Cell("average" if wide else "avg", mean, 5, 4),
        Cell("ITL p50" if wide else "ITL", seconds(numbers.itl_p50_s), 7, 5),
        Cell("p95", seconds(numbers.itl_p95_s), 7, 6),
    ]
    text = row(cells, width - LEAST_TICKS - len(GAP))
    room = width - text.cell_length - len(GAP)
    top = nice_top(2 * numbers.itl_p50_s or numbers.itl_p95_s)
    ticks = sparkline(numbers.gaps, room, top=top, style="$accent", above="$error")
    return Content.assemble(text, GAP, ticks)


def reading(numbers: Numbers, width: int) -> Content:
    """How far the prompt is read; until the first piece of it is, how long it has been waited for."""
    if numbers.phase is Phase.WAITING:
        queue = f"  place {numbers.place:,} in the queue, {numbers.running:,} running" if numbers.place else ""
        return Content.assemble(("waiting ", LABEL), seconds(max(numbers.elapsed_s, 0.0)), queue)
    total, done = numbers.metrics.prompt_tokens, numbers.read_tokens
    fraction = done / total if total else 0.0
    told = f"{done:>{len(f'{total:,}')},} of {total:,} tokens"
    taken = numbers.elapsed_s - numbers.metrics.queue_s
    speed = (done - numbers.metrics.cached_tokens) / taken if taken > 0 else math.nan
    cells = [Cell("reading", told, len(told), style="bold"), Cell("", rate(speed), 14, 1)]
    text = row(cells, width - 12)
    room = width - text.cell_length - len(GAP)
    return Content.assemble(text, GAP, Content.styled(bar(fraction, room, "░"), "$accent"))


def memory(numbers: Numbers, context: int, width: int) -> Content:
    metrics, wide, used = numbers.metrics, width >= WIDE, numbers.used
    digits = len(f"{context:,}")
    length = 24 if wide else 10
    drawn = bar((used or 0) / context, length, "░")
    told = f"{'-' if used is None else format(used, ','):>{digits}}"
    drafted, accepted = metrics.draft_tokens, metrics.accepted_tokens
    drafts = f"{accepted:,} of {drafted:,}" if wide else f"{accepted / drafted:.0%}" if drafted else "-"
    share = "-" if numbers.roofline is None else f"{numbers.roofline:.0%}"
    others = f"{numbers.running} running, {numbers.waiting} waiting" if numbers.running else "-"
    style = "$error" if used is not None and used > 0.9 * context else "$accent"
    cells = [
        Cell("context" if wide else "", drawn, length, style=style),
        Cell("", told, digits, after=f" of {context:,}"),
        Cell("KV", "-" if numbers.kept_bytes is None else size(numbers.kept_bytes), 7, 2),
        Cell("roofline", share, 5, 1),
        Cell("cached", f"{metrics.cached_tokens:,}", digits, 4),
        Cell("drafts", drafts, 15 if wide else 4, 3, left=wide),
        *([Cell("requests", others, 24, 5, left=True)] if wide else []),
    ]
    return row(cells, width)


def row(cells: Sequence[Cell], width: int) -> Content:
    """As many of the cells as fit, in their order."""
    shown = list(cells)
    while len(shown) > 1 and sum(cell.cells + len(GAP) for cell in shown) - len(GAP) > width:
        shown.remove(max(shown, key=lambda cell: cell.rank))
    return Content(GAP).join(cell.content for cell in shown)

"""Two lines of numbers with fixed columns: what stands where depends on width and model, not on the numbers.

Where there is little room, the least important numbers are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from localllm.formatting import format_bytes, format_rate, format_seconds
from localllm.tui.metrics.live import AnswerPhase, LiveNumbers
from localllm.tui.sparkline import bar, round_up_scale, sparkline

GAP = "  "
LABEL_STYLE = "$foreground-muted"
WIDE_MIN_COLUMNS = 110  # columns from which labels are written out
MIN_SPARKLINE_CELLS = 8


@dataclass(frozen=True)
class Metric:
    label: str
    value: str
    width: int  # that the value may take
    drop_priority: int = 0  # the highest are left out first
    suffix: str = ""
    style: str = ""
    left_aligned: bool = False  # where the value stands in its width

    @property
    def total_width(self) -> int:
        return len(self.label) + bool(self.label) + self.width + len(self.suffix)

    @property
    def content(self) -> Content:
        value = self.value.ljust(self.width) if self.left_aligned else self.value.rjust(self.width)
        space = " " if self.label else ""
        label, after = Content.styled(self.label + space, LABEL_STYLE), Content.styled(self.suffix, LABEL_STYLE)
        return Content.assemble(label, Content.styled(value, self.style), after)


def render_metrics(numbers: LiveNumbers, context: int, width: int) -> Content:
    first = (
        prefill_line(numbers, width)
        if numbers.phase in (AnswerPhase.WAITING, AnswerPhase.PREFILL)
        else speed_line(numbers, width)
    )
    return Content("\n").join([first, memory_line(numbers, context, width)])


def speed_line(numbers: LiveNumbers, width: int) -> Content:
    metrics, wide = numbers.metrics, width >= WIDE_MIN_COLUMNS
    now, mean = (
        format_rate(numbers.current_tokens_per_s),
        format_rate(metrics.tokens_per_s).removesuffix(" tokens/s"),
    )
    cells = [
        Metric("TTFT", format_seconds(metrics.ttft_s), 7, 3),
        Metric("now" if wide else "", now, 14, style="bold"),
        Metric("average" if wide else "avg", mean, 5, 4),
        Metric("ITL p50" if wide else "ITL", format_seconds(numbers.itl_p50_s), 7, 5),
        Metric("p95", format_seconds(numbers.itl_p95_s), 7, 6),
    ]
    text = fit_row(cells, width - MIN_SPARKLINE_CELLS - len(GAP))
    room = width - text.cell_length - len(GAP)
    top = round_up_scale(2 * numbers.itl_p50_s or numbers.itl_p95_s)
    ticks = sparkline(numbers.gaps, room, top=top, style="$accent", above_style="$error")
    return Content.assemble(text, GAP, ticks)


def prefill_line(numbers: LiveNumbers, width: int) -> Content:
    """How far the prompt is read; until the first piece of it is, how long it has been waited for."""
    if numbers.phase is AnswerPhase.WAITING:
        queue = (
            f"  place {numbers.queue_position:,} in the queue, {numbers.running:,} running"
            if numbers.queue_position
            else ""
        )
        return Content.assemble(("waiting ", LABEL_STYLE), format_seconds(max(numbers.elapsed_s, 0.0)), queue)
    total, done = numbers.metrics.prompt_tokens, numbers.prefilled_tokens
    fraction = done / total if total else 0.0
    told = f"{done:>{len(f'{total:,}')},} of {total:,} tokens"
    taken = numbers.elapsed_s - numbers.metrics.queue_s
    speed = (done - numbers.metrics.cached_tokens) / taken if taken > 0 else math.nan
    cells = [Metric("reading", told, len(told), style="bold"), Metric("", format_rate(speed), 14, 1)]
    text = fit_row(cells, width - 12)
    room = width - text.cell_length - len(GAP)
    return Content.assemble(text, GAP, Content.styled(bar(fraction, room, "░"), "$accent"))


def memory_line(numbers: LiveNumbers, context: int, width: int) -> Content:
    metrics, wide, used = numbers.metrics, width >= WIDE_MIN_COLUMNS, numbers.context_tokens
    digits = len(f"{context:,}")
    length = 24 if wide else 10
    drawn = bar((used or 0) / context, length, "░")
    told = f"{'-' if used is None else format(used, ','):>{digits}}"
    drafted, accepted = metrics.draft_tokens, metrics.accepted_tokens
    drafts = f"{accepted:,} of {drafted:,}" if wide else f"{accepted / drafted:.0%}" if drafted else "-"
    share = "-" if numbers.roofline_fraction is None else f"{numbers.roofline_fraction:.0%}"
    others = f"{numbers.running} running, {numbers.waiting} waiting" if numbers.running else "-"
    style = "$error" if used is not None and used > 0.9 * context else "$accent"
    cells = [
        Metric("context" if wide else "", drawn, length, style=style),
        Metric("", told, digits, suffix=f" of {context:,}"),
        Metric("KV", "-" if numbers.kv_bytes is None else format_bytes(numbers.kv_bytes), 7, 2),
        Metric("roofline", share, 5, 1),
        Metric("cached", f"{metrics.cached_tokens:,}", digits, 4),
        Metric("drafts", drafts, 15 if wide else 4, 3, left_aligned=wide),
        *([Metric("requests", others, 24, 5, left_aligned=True)] if wide else []),
    ]
    return fit_row(cells, width)


def fit_row(metrics: Sequence[Metric], width: int) -> Content:
    """As many of the cells as fit, in their order."""
    shown = list(metrics)
    while len(shown) > 1 and sum(cell.total_width + len(GAP) for cell in shown) - len(GAP) > width:
        shown.remove(max(shown, key=lambda cell: cell.drop_priority))
    return Content(GAP).join(cell.content for cell in shown)

"""The numbers of an answer under way, from its events as they come; definitions as in `localllm/metrics.py`.

Knows nothing of screens. When the answer has ended, the engine's own measurements take the place of these.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from textual.content import Content

from localllm.formatting import format_bytes, format_rate, format_seconds
from localllm.metrics import Metrics, StepReads, StepReport, percentile
from localllm.tui.answering import TimedEvent
from localllm.tui.drawing import bar, round_up_scale, sparkline

RATE_WINDOW_S = 1.0  # what `now` is a mean over
MAX_GAPS = 512  # for a sparkline
MAX_TOKEN_TIMES = 4096  # tokens whose time is known for `now`


class AnswerPhase(StrEnum):
    IDLE = "idle"  # nothing was asked yet
    WAITING = "waiting"  # no step was reported
    PREFILL = "reading"  # the prompt
    DECODE = "writing"
    ENDED = "ended"


@dataclass(frozen=True)
class LiveNumbers:
    """What a screen shows; NaN or None where it is not known. `metrics` has no single gaps until the end."""

    phase: AnswerPhase
    metrics: Metrics
    elapsed_s: float = math.nan
    current_tokens_per_s: float = math.nan  # tokens a second, over the last second or so
    itl_p50_s: float = math.nan
    itl_p95_s: float = math.nan
    gaps: tuple[float, ...] = ()  # the newest, in seconds
    prefilled_tokens: int = 0  # of the prompt, found or computed
    context_tokens: int | None = None  # tokens of the context
    kv_bytes: float | None = None  # of their keys and values
    roofline_fraction: float | None = None  # share of the measured bandwidth
    running: int = 0  # requests that the last step was for, this among them; 0: not known
    waiting: int = 0  # requests behind them
    queue_position: int = 0  # in the queue, counted from 1; 0: it is worked on, or that is not known


NO_METRICS = Metrics(0, 0, 0, math.nan, 0.0, math.nan, math.nan, (), math.nan, 0)
IDLE_NUMBERS = LiveNumbers(AnswerPhase.IDLE, NO_METRICS)


class LiveMetrics:
    """Follows one answer. Times are seconds since its request arrived: the engine's own where it reports its
    steps, else those of whoever reads."""

    def __init__(self, began: float, reads: StepReads | None = None):
        self.began = began
        self.reads = reads
        self.scheduled_s = self.first_token_s = self.last_token_s = math.nan
        self.output = self.drafted = self.accepted = 0
        self.prompt: int | None = None  # tokens, once known
        self.cached_tokens = self.computed = self.running = self.waiting = self.queue_position = 0
        self.has_steps = False
        self.times: deque[float] = deque(maxlen=MAX_TOKEN_TIMES)
        self.gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self.sorted_gaps: list[float] = []  # all gaps, by length
        self.final_metrics: Metrics | None = None
        self.stopped = False

    def end(self) -> None:
        """Nothing comes any more, with or without the engine's measurements; this request runs no more."""
        self.running = max(0, self.running - (not self.stopped))
        self.stopped = True

    def follow(self, events: Sequence[TimedEvent]) -> None:
        for when, event in events:
            at = when - self.began
            if step := event.step:
                at = step.ended_s
                self.record_step(step)
            elif self.has_steps:
                at = self.last_token_s  # another token of the same step
            for _ in event.token_ids:
                self.record_token(at)
                self.drafted += event.drafted
                self.accepted += event.accepted
            self.final_metrics = event.metrics or self.final_metrics

    def record_step(self, step: StepReport) -> None:
        if step.tokens and not self.has_steps:
            self.has_steps, self.scheduled_s = True, step.began_s
        self.prompt, self.queue_position = step.prompt, step.place
        self.cached_tokens, self.computed = step.found, step.computed
        self.running, self.waiting = step.running, step.waiting

    def record_token(self, at: float) -> None:
        if self.output:
            self.gaps.append(at - self.last_token_s)
            insort(self.sorted_gaps, at - self.last_token_s)
        else:
            self.first_token_s = at
        self.output += 1
        self.last_token_s = at
        self.times.append(at)

    @property
    def phase(self) -> AnswerPhase:
        if self.stopped or self.final_metrics:
            return AnswerPhase.ENDED
        return (
            AnswerPhase.DECODE if self.output else AnswerPhase.PREFILL if self.has_steps else AnswerPhase.WAITING
        )

    def numbers(self, now: float) -> LiveNumbers:
        """now: in seconds of `time.perf_counter()`."""
        if self.final_metrics:
            return self.final_numbers(self.final_metrics)
        elapsed = self.last_token_s if self.stopped else now - self.began
        metrics = replace(
            NO_METRICS,
            prompt_tokens=self.prompt or 0,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output,
            queue_s=self.scheduled_s,
            prefill_s=self.first_token_s - self.scheduled_s,
            ttft_s=self.first_token_s,
            e2e_s=self.last_token_s,
            draft_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
        rate = metrics.tokens_per_s if self.stopped else self.current_tokens_per_s(elapsed)
        used = None
        if self.prompt is not None:
            used = self.prompt + self.output if self.output else self.computed
        return LiveNumbers(
            self.phase,
            metrics,
            elapsed,
            rate,
            percentile(self.sorted_gaps, 50),
            percentile(self.sorted_gaps, 95),
            tuple(self.gaps),
            self.computed,
            used,
            self.kv_bytes(self.computed),
            self.roofline_fraction(rate, metrics, used),
            self.running,
            self.waiting,
            self.queue_position,
        )

    def final_numbers(self, metrics: Metrics) -> LiveNumbers:
        """By the engine's own measurements."""
        used, rate = metrics.prompt_tokens + metrics.output_tokens, metrics.tokens_per_s
        return LiveNumbers(
            AnswerPhase.ENDED,
            metrics,
            metrics.e2e_s,
            rate,
            metrics.itl_percentile(50),
            metrics.itl_percentile(95),
            metrics.itl_s[-MAX_GAPS:],
            metrics.prompt_tokens,
            used,
            self.kv_bytes(used - 1),
            self.roofline_fraction(rate, metrics, used - metrics.output_tokens / 2),
            self.running,
            self.waiting,
        )

    def current_tokens_per_s(self, elapsed: float) -> float:
        """The mean over the gaps of the last second, at least one; it falls while the next token is overdue."""
        if len(self.times) < 2:
            return math.nan
        gaps, base = 0, self.last_token_s
        for gaps, base in enumerate(reversed(self.times)):
            if gaps and base <= self.last_token_s - RATE_WINDOW_S:
                break
        if base == self.last_token_s:  # all of one step
            return math.nan
        mean = gaps / (self.last_token_s - base)
        return min(mean, (gaps + 1) / max(elapsed - base, 1e-9))

    def kv_bytes(self, computed: int) -> float | None:
        """Of so many tokens; the newest of an answer is not among them."""
        return self.reads.kept_per_token * computed if self.reads and computed else None

    def roofline_fraction(self, tokens_per_s: float, metrics: Metrics, used: float | None) -> float | None:
        steps_per_s = tokens_per_s / metrics.tokens_per_step if metrics.output_tokens else math.nan
        if self.reads is None or used is None or math.isnan(steps_per_s):
            return None
        return self.reads.bandwidth_fraction(steps_per_s, used)


# Two lines of numbers with fixed columns: what stands where depends on width and model, not on the numbers.
#
# Where there is little room, the least important numbers are left out.

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

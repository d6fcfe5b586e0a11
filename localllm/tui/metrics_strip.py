"""The metrics below a conversation: live numbers of the answer under way, dimmed once it has ended.

Times are in seconds and sizes in bytes; definitions as in `localllm/metrics.py`. When an answer ends, the engine's
own measurements replace the numbers that were derived from its events.
"""

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget

from localllm.conversation.model import Model
from localllm.formatting import format_bytes, format_rate, format_seconds
from localllm.metrics import Metrics, StepReads, StepReport, percentile
from localllm.tui.answer_thread import AnswerEnd, TimedEvent
from localllm.tui.drawing import bar, round_up_scale, sparkline

FRAME_S = 1 / 30
RATE_WINDOW_S = 1.0  # `now` averages over this window
MAX_GAPS = 512  # in the sparkline
MAX_TOKEN_TIMES = 4096  # for `now`
GAP = "  "  # between two metrics
LABEL_STYLE = "$foreground-muted"
WIDE_MIN_COLUMNS = 110  # with full labels from this width on
MIN_SPARKLINE_CELLS = 8


class AnswerPhase(StrEnum):
    IDLE = "idle"  # before the first question
    WAITING = "waiting"  # for the first step
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(frozen=True)
class LiveNumbers:
    """The metrics on display; NaN or None if unknown. `metrics.itl_s` stays empty until the answer ends."""

    phase: AnswerPhase
    metrics: Metrics
    elapsed_s: float = math.nan
    current_tokens_per_s: float = math.nan  # over about the last second
    itl_p50_s: float = math.nan
    itl_p95_s: float = math.nan
    gaps: tuple[float, ...] = ()  # newest inter-token latencies
    prefilled_tokens: int = 0  # prompt tokens cached or computed
    context_tokens: int | None = None  # prompt and answer so far
    kv_bytes: float | None = None  # size of their keys and values
    roofline_fraction: float | None = None  # of the measured memory bandwidth
    running: int = 0  # requests in the last step, including this one; 0 if unknown
    waiting: int = 0  # requests in the queue
    queue_position: int = 0  # from 1; 0 if running or unknown


NO_METRICS = Metrics(0, 0, 0, math.nan, 0.0, math.nan, math.nan, (), math.nan, 0)
IDLE_NUMBERS = LiveNumbers(AnswerPhase.IDLE, NO_METRICS)


class MetricsStrip(Widget):
    """Two lines of live metrics, redrawn at most thirty times per second and only when they change."""

    DEFAULT_CSS = """
    MetricsStrip {
        height: 2;
        padding: 0 1;
        text-wrap: nowrap;
        text-overflow: clip;
        &.-idle { text-style: dim; }
    }
    """

    numbers: reactive[LiveNumbers] = reactive(IDLE_NUMBERS)

    def __init__(self, model: Model, clock: Callable[[], float] = time.perf_counter):
        """clock: the clock of the event times"""
        super().__init__(classes="-idle")
        self.model = model
        self.clock = clock
        self.live: LiveMetrics | None = None
        self.frames: Timer | None = None

    def on_mount(self) -> None:
        self.frames = self.set_interval(FRAME_S, self.update_numbers, pause=self.live is None)

    def begin(self, began: float) -> None:
        self.live = LiveMetrics(began, self.model.reads)
        self.update_numbers()
        if self.frames:
            self.frames.resume()

    def follow(self, events: Sequence[TimedEvent]) -> None:
        if self.live:
            self.live.follow(events)

    def end(self, outcome: AnswerEnd) -> None:
        if self.frames:
            self.frames.pause()
        if self.live:
            self.live.end()
        self.update_numbers()

    def update_reads(self) -> None:
        """Show the roofline fraction of the current answer once the machine's memory bandwidth is measured."""
        if self.live:
            self.live.reads = self.model.reads
            self.update_numbers()

    def update_numbers(self) -> None:
        if self.live:
            self.numbers = self.live.numbers(self.clock())

    def watch_numbers(self, before: LiveNumbers, after: LiveNumbers) -> None:
        self.set_class(after.phase in (AnswerPhase.IDLE, AnswerPhase.ENDED), "-idle")

    def render(self) -> Content:
        return render_metrics(self.numbers, self.model.context, self.size.width)


class LiveMetrics:
    """Computes the metrics of one answer from its events.

    Times are seconds since the request arrived: the engine's where it reports its steps, otherwise times of
    receipt.
    """

    def __init__(self, began: float, reads: StepReads | None = None):
        self.began = began
        self.reads = reads
        self.scheduled_s = self.first_token_s = self.last_token_s = math.nan
        self.output = self.drafted = self.accepted = 0
        self.prompt: int | None = None  # prompt tokens, None until reported
        self.cached_tokens = self.computed = self.running = self.waiting = self.queue_position = 0
        self.has_steps = False
        self.times: deque[float] = deque(maxlen=MAX_TOKEN_TIMES)
        self.gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self.sorted_gaps: list[float] = []  # all of them, ascending
        self.final_metrics: Metrics | None = None
        self.stopped = False

    def end(self) -> None:
        """Record the end of the answer; it no longer counts as a running request."""
        self.running = max(0, self.running - (not self.stopped))
        self.stopped = True

    def follow(self, events: Sequence[TimedEvent]) -> None:
        for when, event in events:
            at = when - self.began
            if step := event.step:
                at = step.ended_s
                self.record_step(step)
            elif self.has_steps:
                at = self.last_token_s  # further token of the same step
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
        """Return the metrics at `now`, in seconds of `time.perf_counter()`."""
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
        """Return the metrics as measured by the engine."""
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
        """Return the mean over the gaps of the last second, at least one; it falls while a token is overdue."""
        if len(self.times) < 2:
            return math.nan
        gaps, base = 0, self.last_token_s
        for gaps, base in enumerate(reversed(self.times)):
            if gaps and base <= self.last_token_s - RATE_WINDOW_S:
                break
        if base == self.last_token_s:  # all tokens are from one step
            return math.nan
        mean = gaps / (self.last_token_s - base)
        return min(mean, (gaps + 1) / max(elapsed - base, 1e-9))

    def kv_bytes(self, computed: int) -> float | None:
        """Return the size of the keys and values of `computed` tokens; the newest token has none yet."""
        return self.reads.kept_per_token * computed if self.reads and computed else None

    def roofline_fraction(self, tokens_per_s: float, metrics: Metrics, used: float | None) -> float | None:
        steps_per_s = tokens_per_s / metrics.tokens_per_step if metrics.output_tokens else math.nan
        if self.reads is None or used is None or math.isnan(steps_per_s):
            return None
        return self.reads.bandwidth_fraction(steps_per_s, used)


@dataclass(frozen=True)
class Metric:
    """A labelled value in a column of fixed width."""

    label: str
    value: str
    width: int  # cells reserved for the value
    drop_priority: int = 0  # the highest are dropped first in a narrow window
    suffix: str = ""
    style: str = ""
    left_aligned: bool = False

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
    """Return two lines whose columns depend on the width and the model only, so that numbers do not move."""
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
    ticks_width = width - text.cell_length - len(GAP)
    top = round_up_scale(2 * numbers.itl_p50_s or numbers.itl_p95_s)
    ticks = sparkline(numbers.gaps, ticks_width, top=top, style="$accent", above_style="$error")
    return Content.assemble(text, GAP, ticks)


def prefill_line(numbers: LiveNumbers, width: int) -> Content:
    """Return the progress of prefill, or the waiting time before its first chunk."""
    if numbers.phase is AnswerPhase.WAITING:
        queue = (
            f"  position {numbers.queue_position:,} in the queue, {numbers.running:,} running"
            if numbers.queue_position
            else ""
        )
        return Content.assemble(("waiting ", LABEL_STYLE), format_seconds(max(numbers.elapsed_s, 0.0)), queue)
    total, done = numbers.metrics.prompt_tokens, numbers.prefilled_tokens
    fraction = done / total if total else 0.0
    progress = f"{done:>{len(f'{total:,}')},} of {total:,} tokens"
    elapsed = numbers.elapsed_s - numbers.metrics.queue_s
    speed = (done - numbers.metrics.cached_tokens) / elapsed if elapsed > 0 else math.nan
    cells = [Metric("prefill", progress, len(progress), style="bold"), Metric("", format_rate(speed), 14, 1)]
    text = fit_row(cells, width - 12)
    bar_width = width - text.cell_length - len(GAP)
    return Content.assemble(text, GAP, Content.styled(bar(fraction, bar_width, "░"), "$accent"))


def memory_line(numbers: LiveNumbers, context: int, width: int) -> Content:
    metrics, wide, used = numbers.metrics, width >= WIDE_MIN_COLUMNS, numbers.context_tokens
    digits = len(f"{context:,}")
    bar_width = 24 if wide else 10
    used_bar = bar((used or 0) / context, bar_width, "░")
    used_text = f"{'-' if used is None else format(used, ','):>{digits}}"
    drafted, accepted = metrics.draft_tokens, metrics.accepted_tokens
    drafts = f"{accepted:,} of {drafted:,}" if wide else f"{accepted / drafted:.0%}" if drafted else "-"
    roofline = "-" if numbers.roofline_fraction is None else f"{numbers.roofline_fraction:.0%}"
    requests = f"{numbers.running} running, {numbers.waiting} waiting" if numbers.running else "-"
    style = "$error" if used is not None and used > 0.9 * context else "$accent"
    cells = [
        Metric("context" if wide else "", used_bar, bar_width, style=style),
        Metric("", used_text, digits, suffix=f" of {context:,}"),
        Metric("KV", "-" if numbers.kv_bytes is None else format_bytes(numbers.kv_bytes), 7, 2),
        Metric("roofline", roofline, 5, 1),
        Metric("cached", f"{metrics.cached_tokens:,}", digits, 4),
        Metric("drafts", drafts, 15 if wide else 4, 3, left_aligned=wide),
        *([Metric("requests", requests, 24, 5, left_aligned=True)] if wide else []),
    ]
    return fit_row(cells, width)


def fit_row(metrics: Sequence[Metric], width: int) -> Content:
    """Return the metrics that fit into `width` cells, in order."""
    shown = list(metrics)
    while len(shown) > 1 and sum(cell.total_width + len(GAP) for cell in shown) - len(GAP) > width:
        shown.remove(max(shown, key=lambda cell: cell.drop_priority))
    return Content(GAP).join(cell.content for cell in shown)

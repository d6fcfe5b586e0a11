"""The numbers of an answer under way, from its events as they come; definitions as in `localllm/metrics.py`.

Knows nothing of screens. When the answer has ended, the engine's own measurements take the place of these.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from localllm.metrics import Metrics, StepReads, StepReport, percentile
from localllm.tui.answering import TimedEvent

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

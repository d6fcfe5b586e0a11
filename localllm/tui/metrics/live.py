"""The numbers of an answer under way, from its events as they come; definitions as in `localllm/metrics.py`.

Knows nothing of screens. When the answer has ended, the engine's own measurements take the place of these.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from localllm.inspection import Reads, StepReport
from localllm.metrics import Metrics, percentile
from localllm.tui.answering import Came

NOW_S = 1.0  # what `now` is a mean over
MOST_GAPS = 512  # for a sparkline
MOST_DECODED = 4096  # tokens whose time is known for `now`


class Phase(StrEnum):
    IDLE = "idle"  # nothing was asked yet
    WAITING = "waiting"  # no step was reported
    READING = "reading"  # the prompt
    WRITING = "writing"
    ENDED = "ended"


@dataclass(frozen=True)
class Numbers:
    """What a screen shows; NaN or None where it is not known. `metrics` has no single gaps until the end."""

    phase: Phase
    metrics: Metrics
    elapsed_s: float = math.nan
    now_per_s: float = math.nan  # tokens a second, over the last second or so
    itl_p50_s: float = math.nan
    itl_p95_s: float = math.nan
    gaps: tuple[float, ...] = ()  # the newest, in seconds
    read_tokens: int = 0  # of the prompt, found or computed
    used: int | None = None  # tokens of the context
    kept_bytes: float | None = None  # of their keys and values
    roofline: float | None = None  # share of the measured bandwidth
    running: int = 0  # requests that the last step was for, this among them; 0: not known
    waiting: int = 0  # requests behind them
    place: int = 0  # in the queue, counted from 1; 0: it is worked on, or that is not known


NOTHING = Metrics(0, 0, 0, math.nan, 0.0, math.nan, math.nan, (), math.nan, 0)
IDLE = Numbers(Phase.IDLE, NOTHING)


class Live:
    """Follows one answer. Times are seconds since its request arrived: the engine's own where it reports its
    steps, else those of whoever reads."""

    def __init__(self, began: float, reads: Reads | None = None):
        self.began = began
        self.reads = reads
        self.scheduled = self.first = self.last = math.nan
        self.output = self.drafted = self.accepted = 0
        self.prompt: int | None = None  # tokens, once known
        self.found = self.computed = self.running = self.waiting = self.place = 0
        self.has_steps = False
        self.times: deque[float] = deque(maxlen=MOST_DECODED)
        self.gaps: deque[float] = deque(maxlen=MOST_GAPS)
        self.ordered: list[float] = []  # all gaps, by length
        self.ended: Metrics | None = None
        self.stopped = False

    def end(self) -> None:
        """Nothing comes any more, with or without the engine's measurements."""
        self.stopped = True

    def follow(self, came: Sequence[Came]) -> None:
        for when, event in came:
            at = when - self.began
            if step := event.step:
                at = step.ended_s
                self.reported(step)
            elif self.has_steps:
                at = self.last  # another token of the same step
            for _ in event.token_ids:
                self.token(at)
                self.drafted += event.drafted
                self.accepted += event.accepted
            self.ended = event.metrics or self.ended

    def reported(self, step: StepReport) -> None:
        if step.tokens and not self.has_steps:
            self.has_steps, self.scheduled = True, step.began_s
        self.prompt, self.place = step.prompt, step.place
        self.found, self.computed = step.found, step.computed
        self.running, self.waiting = step.running, step.waiting

    def token(self, at: float) -> None:
        if self.output:
            self.gaps.append(at - self.last)
            insort(self.ordered, at - self.last)
        else:
            self.first = at
        self.output += 1
        self.last = at
        self.times.append(at)

    @property
    def phase(self) -> Phase:
        if self.stopped or self.ended:
            return Phase.ENDED
        return Phase.WRITING if self.output else Phase.READING if self.has_steps else Phase.WAITING

    def numbers(self, now: float) -> Numbers:
        """now: in seconds of `time.perf_counter()`."""
        if self.ended:
            return self.final(self.ended)
        elapsed = self.last if self.stopped else now - self.began
        metrics = replace(
            NOTHING,
            prompt_tokens=self.prompt or 0,
            cached_tokens=self.found,
            output_tokens=self.output,
            queue_s=self.scheduled,
            prefill_s=self.first - self.scheduled,
            ttft_s=self.first,
            e2e_s=self.last,
            draft_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
        rate = metrics.tokens_per_s if self.stopped else self.now_per_s(elapsed)
        used = None
        if self.prompt is not None:
            used = self.prompt + self.output if self.output else self.computed
        return Numbers(
            self.phase,
            metrics,
            elapsed,
            rate,
            percentile(self.ordered, 50),
            percentile(self.ordered, 95),
            tuple(self.gaps),
            self.computed,
            used,
            self.kept_bytes(self.computed),
            self.roofline(rate, metrics, used),
            self.running,
            self.waiting,
            self.place,
        )

    def final(self, metrics: Metrics) -> Numbers:
        """By the engine's own measurements."""
        used, rate = metrics.prompt_tokens + metrics.output_tokens, metrics.tokens_per_s
        return Numbers(
            Phase.ENDED,
            metrics,
            metrics.e2e_s,
            rate,
            metrics.itl_percentile(50),
            metrics.itl_percentile(95),
            metrics.itl_s[-MOST_GAPS:],
            metrics.prompt_tokens,
            used,
            self.kept_bytes(used - 1),
            self.roofline(rate, metrics, used - metrics.output_tokens / 2),
            self.running,
            self.waiting,
        )

    def now_per_s(self, elapsed: float) -> float:
        """The mean over the gaps of the last second, at least one; it falls while the next token is overdue."""
        if len(self.times) < 2:
            return math.nan
        gaps, base = 0, self.last
        for gaps, base in enumerate(reversed(self.times)):
            if gaps and base <= self.last - NOW_S:
                break
        if base == self.last:  # all of one step
            return math.nan
        mean = gaps / (self.last - base)
        return min(mean, (gaps + 1) / max(elapsed - base, 1e-9))

    def kept_bytes(self, computed: int) -> float | None:
        """Of so many tokens; the newest of an answer is not among them."""
        return self.reads.kept_per_token * computed if self.reads and computed else None

    def roofline(self, tokens_per_s: float, metrics: Metrics, used: float | None) -> float | None:
        steps_per_s = tokens_per_s / metrics.tokens_per_step if metrics.output_tokens else math.nan
        if self.reads is None or used is None or math.isnan(steps_per_s):
            return None
        return self.reads.fraction(steps_per_s, used)

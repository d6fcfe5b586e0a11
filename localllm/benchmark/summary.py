"""Summarizes measurements of several requests or rounds as distributions. `metrics.py` defines each measure."""

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localllm.errors import UsageError
from localllm.metrics import Metrics, percentile

CONFIDENCE = 0.95
MIN_PAIRS = 3


@dataclass(frozen=True)
class Distribution:
    """Values of one measure, in its unit; all NaN if there are none."""

    count: int
    mean: float
    low: float
    p50: float
    p95: float
    p99: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        """Summarize the values, ignoring NaN."""
        measured = [value for value in values if not math.isnan(value)]
        if not measured:
            return cls(0, *[math.nan] * 6)
        p50, p95, p99 = (percentile(measured, percent) for percent in (50, 95, 99))
        return cls(len(measured), statistics.fmean(measured), min(measured), p50, p95, p99, max(measured))

    @property
    def spread(self) -> float:
        """Half of the range from the lowest to the highest, as a share of the median: 0.05 is ±5%."""
        return (self.high - self.low) / 2 / self.p50 if self.p50 else math.nan

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the JSON object, with None instead of NaN."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in vars(self).items()}


@dataclass(frozen=True)
class RequestSummary:
    """Several requests together. Times are in seconds, rates in tokens per second of one request."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    ttft_s: Distribution
    itl_s: Distribution  # all gaps of all requests
    tpot_s: Distribution
    e2e_s: Distribution
    tokens_per_s: Distribution
    prefill_tokens_per_s: Distribution


def summarize(metrics: Sequence[Metrics]) -> RequestSummary:
    return RequestSummary(
        requests=len(metrics),
        prompt_tokens=sum(m.prompt_tokens for m in metrics),
        cached_tokens=sum(m.cached_tokens for m in metrics),
        output_tokens=sum(m.output_tokens for m in metrics),
        draft_tokens=sum(m.draft_tokens for m in metrics),
        accepted_tokens=sum(m.accepted_tokens for m in metrics),
        ttft_s=Distribution.of(m.ttft_s for m in metrics),
        itl_s=Distribution.of(gap for m in metrics for gap in m.itl_s),
        tpot_s=Distribution.of(m.tpot_s for m in metrics),
        e2e_s=Distribution.of(m.e2e_s for m in metrics),
        tokens_per_s=Distribution.of(m.tokens_per_s for m in metrics),
        prefill_tokens_per_s=Distribution.of(m.prefill_tokens_per_s for m in metrics),
    )


@dataclass(frozen=True)
class Ratio:
    """Speed of A relative to B: above 1, A is faster."""

    ratio: float
    low: float  # of the confidence interval
    high: float
    pairs: int

    @property
    def shown(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1 <= self.high

    def verdict(self, a: str, b: str) -> str:
        if self.shown and self.ratio < 1:
            return Ratio(1 / self.ratio, 1 / self.high, 1 / self.low, self.pairs).verdict(b, a)
        digits = 2 if self.high - self.low > 0.02 else 3
        ratio, low, high = (f"{value:.{digits}f}" for value in (self.ratio, self.low, self.high))
        claim = f"{a} is {ratio}x as fast as {b}" if self.shown else f"no difference shown: {ratio}x"
        return f"{claim} ({CONFIDENCE:.0%} CI {low} to {high})"


def check_pairs(count: int) -> None:
    """Raises UsageError for too few pairs to draw conclusions."""
    if count < MIN_PAIRS:
        rounds = "one round is" if count == 1 else f"{count} rounds are"
        raise UsageError(f"{rounds} too few to compare", f"use --repeat {MIN_PAIRS} or more")


def paired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Return how many times as fast a is as b. a, b: rates; equal indices were measured in direct succession.

    The logarithms of the ratios are assumed to be normally distributed: their mean with Student's t interval,
    transformed back, is the geometric mean with its confidence interval (Bland and Altman 1996, BMJ 312:1079; for
    computer timings: Hoefler and Belli 2015, Scientific Benchmarking of Parallel Computing Systems, rule 5). A
    slow minute affects both sides of a pair, and so cancels out. Raises UsageError like `check_pairs`.
    """
    check_pairs(len(a))
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean, deviation = statistics.fmean(logs), statistics.stdev(logs)
    margin = student_t_quantile((1 + confidence) / 2, len(logs) - 1) * deviation / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin), len(logs))


@functools.cache
def student_t_quantile(p: float, freedom: int) -> float:
    """Return the p-quantile of Student's t distribution, 0.5 < p < 1, by bisection."""
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < p:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if student_t_cdf(middle, freedom) < p else (low, middle)
    return high


def student_t_cdf(t: float, freedom: int) -> float:
    """P(T <= t), t >= 0 (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: sums for integer degrees of freedom)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd + 1, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    between = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + between) / 2

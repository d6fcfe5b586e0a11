"""How many times as fast one thing is as another, of pairs that were measured one right after the other.

The logarithms of the pairs' ratios are taken for a sample of a normal distribution: their mean with Student's t
interval, back from the logarithms, is the geometric mean of the ratios with its confidence interval (Bland and
Altman 1996, BMJ 312:1079; for timings of computers: Hoefler and Belli 2015, Scientific Benchmarking of Parallel
Computing Systems, rule 5). A slow minute hits both of a pair, and so leaves their ratio as it is.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.errors import UsageError

CONFIDENCE = 0.95
MIN_PAIRS = 3


@dataclass(frozen=True)
class Ratio:
    """Of A to B: above 1 A is faster."""

    ratio: float
    low: float  # of the confidence interval
    high: float
    pairs: int

    @property
    def shown(self) -> bool:
        """Does the interval leave out 1?"""
        return not self.low <= 1 <= self.high

    def verdict(self, a: str, b: str) -> str:
        if self.shown and self.ratio < 1:
            return Ratio(1 / self.ratio, 1 / self.high, 1 / self.low, self.pairs).verdict(b, a)
        digits = 2 if self.high - self.low > 0.02 else 3
        ratio, low, high = (f"{value:.{digits}f}" for value in (self.ratio, self.low, self.high))
        said = f"{a} is {ratio}x as fast as {b}" if self.shown else f"no difference shown: {ratio}x"
        return f"{said} ({CONFIDENCE:.0%} CI {low} to {high})"


def check_pairs(count: int) -> None:
    """Raises UsageError for too few to tell anything."""
    if count < MIN_PAIRS:
        rounds = "one round tells" if count == 1 else f"{count} rounds tell"
        raise UsageError(f"{rounds} little of chance", f"give --repeat {MIN_PAIRS} or more")


def paired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """a, b: rates, the same place of both being one pair. Raises UsageError as `check_pairs`."""
    check_pairs(len(a))
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean, deviation = statistics.fmean(logs), statistics.stdev(logs)
    reach = student_t_quantile((1 + confidence) / 2, len(logs) - 1) * deviation / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))


@functools.cache
def student_t_quantile(p: float, freedom: int) -> float:
    """Where Student's t distribution reaches p, 0.5 < p < 1: by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < p:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if student_t_cdf(middle, freedom) < p else (low, middle)
    return high


def student_t_cdf(t: float, freedom: int) -> float:
    """P(T <= t), t >= 0 (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: sums for whole degrees of freedom)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd + 1, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    between = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + between) / 2

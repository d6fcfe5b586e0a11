"""Summarizes measurements of several requests or rounds as distributions. `metrics.py` defines each measure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localllm.metrics import Metrics, percentile


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

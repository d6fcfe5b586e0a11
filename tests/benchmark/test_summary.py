"""Distributions are numpy's, and a summary is that of every request's own measures."""

import math

import numpy
import pytest

from localllm.benchmark.summary import Distribution, summarize
from localllm.metrics import Metrics


def request(gaps: tuple[float, ...], prompt: int = 10, cached: int = 0) -> Metrics:
    return Metrics(
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=len(gaps) + 1,
        queue_s=0.1,
        load_s=0.0,
        prefill_s=0.4,
        ttft_s=0.5,
        itl_s=gaps,
        e2e_s=0.5 + sum(gaps),
        peak_bytes=1,
    )


def test_a_distribution_is_that_of_numpy() -> None:
    values = numpy.random.default_rng(0).exponential(size=37)
    found = Distribution.of(values)
    expected = [37, values.mean(), values.min(), *numpy.percentile(values, [50, 95, 99]), values.max()]
    assert list(vars(found).values()) == pytest.approx(expected)
    assert found.spread == pytest.approx((values.max() - values.min()) / 2 / numpy.median(values))


def test_missing_measurements_are_left_out() -> None:
    assert Distribution.of([math.nan, 2.0, 4.0]) == Distribution.of([2.0, 4.0])
    nothing = Distribution.of([math.nan])
    assert nothing.as_dict() == {"count": 0} | dict.fromkeys(("mean", "low", "p50", "p95", "p99", "high"))
    assert math.isnan(nothing.spread)


def test_every_gap_of_every_request_counts_once() -> None:
    found = summarize([request((0.1, 0.2)), request((0.3,), prompt=30, cached=16), request(())])
    assert (found.requests, found.prompt_tokens, found.cached_tokens, found.output_tokens) == (3, 50, 16, 6)
    assert (found.itl_s.count, found.itl_s.p50, found.itl_s.high) == (3, 0.2, 0.3)
    assert found.tpot_s.count == 2  # an answer of one token has none
    assert found.tpot_s.mean == pytest.approx((0.15 + 0.3) / 2)
    assert found.prefill_tokens_per_s.p50 == pytest.approx(10 / 0.4)
    assert found.e2e_s.low == 0.5

"""Distributions equal numpy's, and a summary aggregates the measures of every request."""

import math
import random
from collections.abc import Callable

import numpy
import pytest

from localllm.benchmark.summary import (
    Distribution,
    Ratio,
    paired_ratio,
    student_t_cdf,
    student_t_quantile,
    summarize,
)
from localllm.errors import UsageError
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


# The interval holds the true ratio as often as it says, also where a machine drifts; verdicts say it in words.

# Abramowitz and Stegun, table 26.10: t of 0.975 and 0.995
TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 9: (2.262, 3.250), 30: (2.042, 2.750)}
TRUE = 1.31
TRIALS = 1000


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_table(freedom: int) -> None:
    found = student_t_quantile(0.975, freedom), student_t_quantile(0.995, freedom)
    assert found == pytest.approx(TABLE[freedom], abs=6e-4)
    assert student_t_cdf(found[0], freedom) == pytest.approx(0.975)


def normal(drawn: random.Random, place: int) -> float:
    return drawn.gauss(0, 0.05)


def drifting(drawn: random.Random, place: int) -> float:
    """Both measurements of a pair slow down over time, each with its own noise."""
    return -0.2 * place


def interrupted(drawn: random.Random, place: int) -> float:
    """Occasionally, another program uses half of the time."""
    return -0.7 if drawn.random() < 0.15 else 0.0


@pytest.mark.parametrize("pairs", [5, 10])
@pytest.mark.parametrize(
    ("shared", "own", "least", "most"),
    [(normal, normal, 0.935, 0.965), (drifting, normal, 0.935, 0.965), (normal, interrupted, 0.92, 1.0)],
    ids=["normal", "drifting", "interrupted"],
)
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(
    shared: Callable[[random.Random, int], float],
    own: Callable[[random.Random, int], float],
    least: float,
    most: float,
    pairs: int,
) -> None:
    drawn = random.Random(7)

    def trial() -> bool:
        both = [shared(drawn, place) for place in range(pairs)]
        a = [TRUE * math.exp(noise + own(drawn, 0) + drawn.gauss(0, 0.01)) for noise in both]
        b = [math.exp(noise + own(drawn, 0) + drawn.gauss(0, 0.01)) for noise in both]
        found = paired_ratio(a, b)
        return found.low <= TRUE <= found.high

    assert least <= sum(trial() for _ in range(TRIALS)) / TRIALS <= most


def test_a_shared_drift_does_not_widen_the_interval() -> None:
    a = [100 * 0.8**place for place in range(6)]
    found = paired_ratio(a, [rate / 2 for rate in a])
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 2, 2))


def test_the_two_sides_can_be_exchanged() -> None:
    a, b = [10.0, 12.0, 11.0], [9.0, 8.0, 9.5]
    one, other = paired_ratio(a, b), paired_ratio(b, a)
    assert (1 / one.ratio, 1 / one.high, 1 / one.low) == pytest.approx((other.ratio, other.low, other.high))


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Ratio(1.31, 1.27, 1.36, 9), "A is 1.31x as fast as B (95% CI 1.27 to 1.36)"),
        (Ratio(0.5, 0.4, 0.625, 9), "B is 2.00x as fast as A (95% CI 1.60 to 2.50)"),
        (Ratio(1.01, 0.97, 1.05, 9), "no difference shown: 1.01x (95% CI 0.97 to 1.05)"),
        (Ratio(1.004, 1.001, 1.007, 9), "A is 1.004x as fast as B (95% CI 1.001 to 1.007)"),
    ],
)
def test_the_verdict_is_in_words(ratio: Ratio, said: str) -> None:
    assert ratio.verdict("A", "B") == said


def test_two_pairs_give_no_verdict() -> None:
    with pytest.raises(UsageError, match="2 rounds are too few to compare; use --repeat 3"):
        paired_ratio([1.0, 2.0], [1.0, 2.0])

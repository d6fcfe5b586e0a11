"""The interval holds the true ratio as often as it says, also where a machine drifts; verdicts say it in words."""

import math
import random
from collections.abc import Callable

import pytest

from localllm.benchmark.summary import Ratio, paired_ratio, student_t_cdf, student_t_quantile
from localllm.errors import UsageError

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
    """Both of a pair are slower and slower, and each has some noise of its own."""
    return -0.2 * place


def interrupted(drawn: random.Random, place: int) -> float:
    """Now and then another program takes half of the time."""
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

"""Draft lengths approach the optimum, and cost almost nothing if no draft is ever accepted: a simulated model."""

import random

import pytest

from localllm.runtime.speculation.draft_budget import (
    INCOME_PER_TOKEN,
    INITIAL_BALANCE,
    MIN_GAIN,
    DraftBudget,
    choose_draft_counts,
    choose_width,
)

MOST = 15
CHEAP = [1 + 0.02 * drafts for drafts in range(MOST + 1)]
CPU = [1 + 0.27 * drafts for drafts in range(MOST + 1)]
STEEP = [1 + 0.9 * drafts for drafts in range(MOST + 1)]


def simulate(accepts: float, prices: list[float], tokens: int, seed: int = 0) -> float:
    """Return the cost of generating `tokens` tokens, in plain steps, if prompt lookup always matches and each
    draft token is correct with probability `accepts`.
    """
    rng, gate = random.Random(seed), DraftBudget()
    said, took, length = 0, 0.0, 3
    while said < tokens:
        costs = [price - 1 for price in prices]
        chances = gate.chances(length, gate.affordable_drafts(costs))
        [count], gain = choose_draft_counts([chances], prices)
        if gain < MIN_GAIN:
            count = int(bool(chances) and gate.should_probe)
        right = next((place for place in range(count) if rng.random() >= accepts), count)
        if count:
            gate.record_verified(length, count, right, costs[count])
        gate.add_income(1 + right)
        length = length + right + 1 if right == count else 3
        said += 1 + right
        took += prices[count]
    return took / said * tokens


def best(accepts: float, prices: list[float]) -> float:
    """Cost per token, in plain steps, of the best constant draft length."""
    return min(price / sum(accepts**i for i in range(count + 1)) for count, price in enumerate(prices))


@pytest.mark.parametrize("prices", [CHEAP, CPU, STEEP], ids=["cheap", "cpu", "steep"])
@pytest.mark.parametrize("accepts", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
def test_it_is_near_the_best_fixed_length(accepts: float, prices: list[float]) -> None:
    tokens = 2000
    took = sum(simulate(accepts, prices, tokens, seed) for seed in range(5)) / 5
    assert took / tokens <= 1.08 * best(accepts, prices)


@pytest.mark.parametrize("prices", [CHEAP, CPU, STEEP], ids=["cheap", "cpu", "steep"])
@pytest.mark.parametrize("tokens", [100, 1000])
def test_drafts_that_are_never_accepted_cost_less_than_the_bound(tokens: int, prices: list[float]) -> None:
    lost = simulate(0.0, prices, tokens) - tokens
    assert lost <= INITIAL_BALANCE + INCOME_PER_TOKEN * tokens
    assert lost <= 0.03 * tokens or tokens == 100
    late = simulate(0.0, prices, 10 * tokens) - 10 * tokens
    assert late - lost <= 0.01 * 9 * tokens  # and less and less is tried


def test_the_most_promising_drafts_of_a_batch_come_first() -> None:
    # 2 + 0.9 + 0.8 tokens for 1.2 steps of two; one more that is seldom right is not worth its price.
    assert choose_draft_counts([[0.9, 0.8], [0.1]], [1, 1.1, 1.2, 1.3]) == ([2, 0], pytest.approx(3.7 / 2 / 1.2))
    assert choose_draft_counts([[0.9, 0.8], [0.85]], [1, 1.1, 1.2, 1.3])[0] == [2, 1]
    assert choose_draft_counts([[0.9], [0.9]], [1, 2, 3])[0] == [0, 0]
    assert choose_draft_counts([[], []], [1]) == ([0, 0], 1)


def test_the_best_shared_width_is_chosen() -> None:
    sure = [0.95**n for n in range(1, 16)]
    flat = [1 + 0.001 * drafts for drafts in range(64)]
    assert choose_width([sure], (1, 4, 8, 16), flat)[0] == 16
    assert choose_width([sure, []], (1, 4, 8, 16), [1 + 0.5 * drafts for drafts in range(64)])[0] == 1
    assert choose_width([sure, []], (1, 4, 8, 16), [1, *([1.3] * 6), *([9.0] * 57)])[0] == 4
    assert choose_width([[]], (), flat) == (1, 1.0)

"""Loads: rates, bursts, closed loops and conversations."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest

from localllm.simulate.load import Lengths, LoadPlan, Turn
from localllm.simulate.simulation import EngineSetup, simulate
from tests.simulate.engines import LinearCost

SETUP = EngineSetup(4000, 16, 512, 64, 4096, asynchronous=False)


def arrivals(plan: LoadPlan) -> list[float]:
    load, times = plan.start(), []
    while load.next_at() < math.inf:
        times.append(load.pop().arrival)
    return times


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 2.0), (0.25, 0.5)])
def test_gaps(burstiness: float, variation: float) -> None:
    """Gaps have the mean of the rate, and the coefficient of variation that the burstiness says."""
    times = arrivals(LoadPlan(rate=20.0, burstiness=burstiness, requests=20_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_same_requests_at_every_rate() -> None:
    slow = LoadPlan(rate=2.0, burstiness=3.0, requests=50)
    assert arrivals(slow) == pytest.approx([2 * at for at in arrivals(slow.scaled_to(4.0))])
    lengths = [[turn.prompt for turn in turns_of(plan)] for plan in (slow, slow.scaled_to(4.0))]
    assert lengths[0] == lengths[1]


def turns_of(plan: LoadPlan) -> list[Turn]:
    load, turns = plan.start(), []
    while load.next_at() < math.inf:
        turns.append(load.pop())
    return turns


def test_closed_loop() -> None:
    """N users have at most N requests at once, and Little's law holds: N = X (R + Z)."""
    plan = LoadPlan(users=10, think_s=2.0, requests=3000, prompt=Lengths(50), output=Lengths(40))
    simulated = simulate(plan, SETUP, LinearCost())
    assert simulated.most_running <= 10
    response = statistics.fmean(simulated.measure("e2e").tolist())
    assert simulated.requests / simulated.duration_s * (response + 2.0) == pytest.approx(10, rel=0.05)


def test_conversations() -> None:
    """Each turn's prompt is the conversation before it and a new question, and is found in the cache."""
    plan = LoadPlan(users=1, turns=4, requests=4, system=100, prompt=Lengths(60), output=Lengths(30))
    simulated = simulate(plan, SETUP, LinearCost())
    assert list(simulated.records.prompt) == [160, 250, 340, 430]
    # All full blocks of the turn before; its last token is not computed.
    assert list(simulated.records.cached) == [0, 189 // 16 * 16, 279 // 16 * 16, 369 // 16 * 16]
    uncached = simulate(plan, replace(SETUP, prefix_caching=False), LinearCost())
    assert sum(uncached.records.cached) == 0 and uncached.duration_s > simulated.duration_s


def test_shared_system_prompt() -> None:
    plan = LoadPlan(rate=0.5, requests=10, system=320, prompt=Lengths(20), output=Lengths(5))
    assert list(simulate(plan, SETUP, LinearCost()).records.cached) == [0, *[320] * 9]


def test_lengths_fit_the_context() -> None:
    plan = LoadPlan(rate=1.0, requests=500, prompt=Lengths(300, 1.0), output=Lengths(200, 1.0), max_len=256)
    assert all(turn.prompt_len >= 1 and turn.prompt_len + turn.answer_len <= 256 for turn in turns_of(plan))


@pytest.mark.parametrize("turns", [1, 3])
def test_number_of_requests(turns: int) -> None:
    same = LoadPlan(rate=50.0, requests=40, turns=turns, max_len=4096)
    for plan in (same, replace(same, rate=None, users=3)):
        assert simulate(plan, SETUP, LinearCost()).requests == 40

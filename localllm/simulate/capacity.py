"""The highest load that a device serves within latency objectives, by bisection, and how it depends on what was
assumed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from localllm.simulate.cost import ScaledCost
from localllm.simulate.load import LoadPlan
from localllm.simulate.simulation import EngineSetup, Simulated, simulate
from localllm.simulate.target import Target

DEFAULT_ATTAINMENT = 0.95  # share of requests that must meet every objective
PRECISION = 0.02  # of the load that is found, relative
MAX_DOUBLINGS = 24
SHORTER = 0.9  # of a run's duration, at most, when its requests come twice as fast; otherwise all come at once
ASSUMED_CHANGE = 0.2  # by which each assumption is changed

Report = Callable[[str], None]


@dataclass(frozen=True)
class Objective:
    """Limits in seconds by measure, and the share of requests that must meet all of them."""

    limits: dict[str, float]
    attainment: float = DEFAULT_ATTAINMENT

    def attained(self, simulated: Simulated) -> float:
        """Return the share of answered requests that meet every limit."""
        return simulated.met(self.limits) / simulated.requests

    def is_met(self, simulated: Simulated) -> bool:
        return self.attained(simulated) >= self.attainment


@dataclass(frozen=True)
class Capacity:
    """The highest load that meets the objective, and its run; None if no load does."""

    amount: float
    simulated: Simulated | None
    runs: int  # simulations that the search took
    at_least: bool = False  # the load has too few requests to find more


def find_capacity(
    load: LoadPlan, objective: Objective, target: Target, report: Report = lambda text: None
) -> Capacity:
    """Double or halve the load until the objective is met on one side alone, then bisect.

    Ends where more changes nothing, as all requests of the load come at once.
    """
    runs, duration = 0, math.inf
    best: tuple[float, Simulated | None] = (0.0, None)

    def serves(amount: float) -> bool:
        nonlocal runs, best, duration
        runs += 1
        report(f"simulating {load.describe(amount)}")
        simulated = simulate(load.scaled_to(amount), target.setup, target.cost)
        duration = simulated.duration_s
        met = objective.is_met(simulated)
        if met and amount > best[0]:
            best = amount, simulated
        return met

    whole = load.users is not None
    low = high = max(1.0, load.amount) if whole else load.amount
    if serves(low):
        for _ in range(MAX_DOUBLINGS):
            high = low * 2
            if whole and high > load.requests:
                high = float(load.requests)
                if high <= low or serves(high):
                    return Capacity(*best, runs, at_least=True)
                break
            before, slower = duration, best
            if not serves(high):
                break
            if not whole and duration > SHORTER * before:
                return Capacity(*slower, runs, at_least=True)
            low = high
    else:
        for _ in range(MAX_DOUBLINGS):
            low = low / 2
            if whole and low < 1:
                return Capacity(0.0, None, runs)
            low = float(int(low)) if whole else low
            if serves(low):
                break
            high = low
        else:
            return Capacity(0.0, None, runs)
    while high - low > (1 if whole else PRECISION * low):
        middle = (low + high) / 2
        middle = float(int(middle)) if whole else middle
        if serves(middle):
            low = middle
        else:
            high = middle
        if whole and high - low <= max(1, PRECISION * low / 2):
            break
    return Capacity(*best, runs)


@dataclass(frozen=True)
class Sensitivity:
    """Change of the capacity with one assumption."""

    assumption: str
    amount: float
    at_least: bool


def sensitivities(
    load: LoadPlan, objective: Objective, target: Target, capacity: Capacity, report: Report = lambda text: None
) -> list[Sensitivity]:
    """Return the capacity with each assumption changed, in both directions."""
    start = load.scaled_to(capacity.amount)
    results: list[Sensitivity] = []
    for name, changed_load, changed_target in changed_assumptions(start, target):
        report(name)
        changed = find_capacity(changed_load, objective, changed_target, report)
        results.append(Sensitivity(name, changed.amount, changed.at_least))
    return results


def scaled_cost(target: Target, factor: float) -> ScaledCost:
    return ScaledCost(target.make_cost(), factor)


def changed_assumptions(load: LoadPlan, target: Target) -> list[tuple[str, LoadPlan, Target]]:
    variants: list[tuple[str, LoadPlan, Target]] = []
    for factor in (1 - ASSUMED_CHANGE, 1 + ASSUMED_CHANGE):
        change = f"{factor - 1:+.0%}"
        if not load.trace:
            variants += [
                (f"prompts {change}", replace(load, prompt=load.prompt.scaled(factor)), target),
                (f"answers {change}", replace(load, output=load.output.scaled(factor)), target),
            ]
        if load.think_s:
            variants.append((f"thinking {change}", replace(load, think_s=load.think_s * factor), target))
        variants.append(
            (f"step durations {change}", load, replace(target, make_cost=partial(scaled_cost, target, factor)))
        )
        blocks = max(1, round(target.setup.blocks * factor))
        smaller: EngineSetup = replace(target.setup, blocks=blocks)
        variants.append((f"cache {change}", load, replace(target, setup=smaller)))
    if load.rate is not None and load.burstiness == 1:
        variants.append(("bursts (burstiness 4)", replace(load, burstiness=4.0), target))
    return sorted(variants, key=lambda variant: variant[0].split()[0])

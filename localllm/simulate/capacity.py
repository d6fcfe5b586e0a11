"""The highest load that a device serves within latency objectives, by bisection, and how it depends on what was
assumed; and what a higher load takes: more replicas, or other settings of the same devices."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from localllm.errors import DoesNotFit
from localllm.routing import MAX_REPLICAS
from localllm.simulate.cost import ScaledCost
from localllm.simulate.fleet import FleetSetup
from localllm.simulate.load import LoadPlan
from localllm.simulate.simulation import EngineSetup, Simulated, simulate
from localllm.simulate.target import Target

DEFAULT_ATTAINMENT = 0.95  # share of requests that must meet every objective
PRECISION = 0.02  # of the load that is found, relative
MAX_DOUBLINGS = 24
SHORTER = 0.9  # of a run's duration, at most, when its requests come twice as fast; else they all come at once
ASSUMED_CHANGE = 0.2  # by which each assumption is changed

Report = Callable[[str], None]
Variant = tuple[str, Callable[[], Target]]  # flags, and the target with them, which may raise DoesNotFit


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
    """How the capacity changes with one assumption."""

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


@dataclass(frozen=True)
class Alternative:
    """The load with other settings on the same devices."""

    flags: str
    attainment: float | None  # share of requests that meet the objectives; None if the model does not fit
    serves: bool


@dataclass(frozen=True)
class Requirement:
    """What the load takes."""

    fleet: FleetSetup | None  # the fewest replicas that serve it; None if replicas do not help
    alternatives: tuple[Alternative, ...]  # that were tried, in the order of their loss of quality


def enlarged(fleet: FleetSetup, count: int) -> FleetSetup:
    """Return a fleet of `count` replicas, with as many for prompts in proportion, or one that scales to them."""
    if fleet.scales:
        return replace(fleet, most_replicas=count)
    prefill = fleet.prefill * count // fleet.replicas
    return replace(fleet, replicas=count, most_replicas=count, prefill=prefill)


def find_requirement(
    load: LoadPlan,
    objective: Objective,
    target: Target,
    capacity: Capacity,
    variants: list[list[Variant]],
    report: Report = lambda text: None,
) -> Requirement | None:
    """Return what the load takes; None if the target serves it.

    variants: groups of settings; a later group is tried if those before do not serve the load
    """
    if capacity.amount >= load.amount:
        return None
    tried: list[Alternative] = []
    for group in variants:
        for flags, make_target in group:
            report(f"simulating {load.describe()} with {flags}")
            try:
                changed = make_target()
            except DoesNotFit:
                tried.append(Alternative(flags, None, serves=False))
                continue
            share = objective.attained(simulate(load, changed.setup, changed.cost))
            tried.append(Alternative(flags, share, serves=share >= objective.attainment))
        if any(alternative.serves for alternative in tried):
            break
    fleet = find_fleet(load, objective, target, capacity, report) if capacity.simulated else None
    return Requirement(fleet, tuple(tried))


def find_fleet(
    load: LoadPlan, objective: Objective, target: Target, capacity: Capacity, report: Report
) -> FleetSetup | None:
    """Return the fewest replicas that serve the load; None if MAX_REPLICAS do not.

    Begins at a proportional share of the capacity for each, from which both sides are near.
    """
    fleet = target.setup.fleet
    unit = fleet.replicas if fleet.prefill else 1  # those for prompts and answers keep their proportion
    largest = MAX_REPLICAS // unit

    def serves(count: int) -> bool:
        larger = enlarged(fleet, count * unit)
        report(f"simulating {load.describe()} on {count * unit} replicas")
        return objective.is_met(simulate(load, replace(target.setup, fleet=larger), target.cost))

    low = fleet.most_replicas // unit  # does not serve it
    high = min(largest, max(low + 1, -int(-low * load.amount // capacity.amount)))
    if high <= low:
        return None
    while not serves(high):
        if high == largest:
            return None
        low, high = high, min(largest, high + max(1, high // 4))
    while high - low > 1:
        # A share of the load is usually served by about as many as were estimated: look next to them first.
        middle = max(low + 1, high - max(1, (high - low) // 4))
        if serves(middle):
            high = middle
        else:
            low = middle
    return enlarged(fleet, high * unit)


def policy_variants(load: LoadPlan, target: Target) -> Iterator[Variant]:
    """Yield policies of the product that the target does without and that this load may profit from."""
    setup = target.setup

    def with_setup(**changes: object) -> Callable[[], Target]:
        return lambda: replace(target, setup=replace(setup, **changes))

    if setup.batching != "continuous":
        yield "--batching continuous", with_setup(batching="continuous")
    if not setup.admission:
        yield "admission control", with_setup(admission=True)
    if load.shares_prefixes and not setup.prefix_caching:
        yield "prefix caching", with_setup(prefix_caching=True)
    if load.shares_prefixes and setup.fleet.most_replicas > 1 and setup.fleet.route != "prefix":
        yield "--route prefix", with_setup(fleet=replace(setup.fleet, route="prefix"))

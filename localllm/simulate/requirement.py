"""The hardware that a load above the capacity requires: more replicas, or other settings of the same devices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from localllm.errors import DoesNotFit
from localllm.routing import MAX_REPLICAS
from localllm.simulate.capacity import Capacity, Objective, Report
from localllm.simulate.fleet import FleetSetup
from localllm.simulate.load import LoadPlan
from localllm.simulate.simulation import simulate
from localllm.simulate.target import Target

Variant = tuple[str, Callable[[], Target]]  # flags, and the target with them, which may raise DoesNotFit


@dataclass(frozen=True)
class Alternative:
    """The load with other settings on the same devices."""

    flags: str
    attainment: float | None  # share of requests that meet the objectives; None if the model does not fit
    serves: bool


@dataclass(frozen=True)
class Requirement:
    """Ways to serve the load."""

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

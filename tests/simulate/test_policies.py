"""Policies beside the product's, and what they are known to do."""

from dataclasses import replace

import pytest

from localllm.errors import UsageError
from localllm.simulate.capacity import policy_variants
from localllm.simulate.fleet import FleetSetup
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.simulation import EngineSetup, Simulated, simulate
from localllm.simulate.target import Target
from tests.simulate.engines import LinearCost

SETUP = EngineSetup(4000, 16, 512, 64, 1024, asynchronous=False)
BUSY = LoadPlan(rate=40.0, requests=300, prompt=Lengths(60, 0.8), output=Lengths(60, 0.9), max_len=1000)


def run(load: LoadPlan = BUSY, **changes: object) -> Simulated:
    return simulate(load, replace(SETUP, **changes), LinearCost())


def p95(simulated: Simulated, name: str = "ttft") -> float:
    return simulated.percentiles(name)[1]


def test_continuous_batching_waits_least() -> None:
    static, dynamic, continuous = (run(batching=name) for name in ("static", "dynamic", "continuous"))
    assert p95(continuous) < p95(dynamic) / 4 and p95(continuous) < p95(static) / 4
    assert static.requests == dynamic.requests == continuous.requests == 300
    assert static.most_running <= 8


def test_static_batch_waits_to_be_full() -> None:
    """Eight requests arrive a second apart: the first waits for the last, or in a dynamic batch for its limit."""
    load = LoadPlan(rate=1.0, requests=8, prompt=Lengths(10), output=Lengths(2))
    last = max(run(load, batching="static").records.arrival)
    assert set(run(load, batching="static").records.scheduled) == {last}
    dynamic = run(load, batching="dynamic", max_wait_s=0.25)
    assert max(dynamic.measure("queue")) == pytest.approx(0.25, abs=0.05)


def test_static_batch_computes_empty_slots() -> None:
    """A batch takes as long as if all its answers were as long as the longest."""
    long = LoadPlan(rate=1e6, requests=8, prompt=Lengths(10), output=Lengths(50))
    mixed = replace(long, output=Lengths(25, 0.6), seed=3)
    longest = max(run(mixed).records.output)
    same = replace(long, output=Lengths(longest))
    duration, full = (run(load, batching="static").duration_s for load in (mixed, same))
    assert duration == pytest.approx(full, rel=0.02)
    assert run(mixed).duration_s < 0.95 * full


def test_static_batch_occupies_whole_contexts() -> None:
    assert run(batching="static", blocks=4 * 1024 // 16).most_running == 4
    with pytest.raises(UsageError, match="do not fit into the cache"):
        run(batching="static", blocks=1024 // 16 - 1, context=1024)


def test_shortest_first_helps_most_and_starves_some() -> None:
    load = LoadPlan(rate=60.0, requests=400, prompt=Lengths(100, 1.2), output=Lengths(30, 0.5), max_len=1000)
    fcfs, shortest = (run(load, order=order, max_running=8) for order in ("fcfs", "shortest"))
    assert shortest.percentiles("ttft")[0] < fcfs.percentiles("ttft")[0]
    assert shortest.percentiles("ttft")[2] > fcfs.percentiles("ttft")[2]


def test_without_admission_control_requests_are_preempted() -> None:
    load = replace(BUSY, rate=100.0)
    controlled, uncontrolled = (run(load, admission=on, blocks=150, max_answer=None) for on in (True, False))
    assert controlled.preemptions < uncontrolled.preemptions
    assert uncontrolled.most_running > controlled.most_running


def test_drafts() -> None:
    """With acceptance p and one draft, a step brings 1 + p tokens."""
    load = LoadPlan(users=1, requests=50, prompt=Lengths(20), output=Lengths(200))
    plain, drafted = run(load), run(load, drafts=1, acceptance=0.6)
    assert drafted.accepted_tokens / drafted.draft_tokens == pytest.approx(0.6, abs=0.03)
    assert plain.steps / drafted.steps == pytest.approx(1.6, rel=0.03)
    assert plain.output_tokens == drafted.output_tokens


def test_smaller_chunks_delay_answers_less() -> None:
    load = LoadPlan(rate=8.0, requests=200, prompt=Lengths(400), output=Lengths(40), max_len=1000)
    small, large = (run(load, token_budget=budget, asynchronous=True) for budget in (64, 512))
    assert small.percentiles("itl")[2] < large.percentiles("itl")[2]
    assert small.percentiles("ttft")[0] > large.percentiles("ttft")[0]


def test_policies_that_are_tried_instead() -> None:
    """Each is the product's, with all else as it was; those for common prefixes are of loads that have some."""
    two = FleetSetup(2, 2)
    given = replace(SETUP, batching="static", admission=False, prefix_caching=False, fleet=two)
    target = Target("model", "device", None, given, LinearCost, None)  # type: ignore[arg-type]
    found = {flags: make().setup for flags, make in policy_variants(replace(BUSY, system=50), target)}
    assert found == {
        "--batching continuous": replace(given, batching="continuous"),
        "admission control": replace(given, admission=True),
        "prefix caching": replace(given, prefix_caching=True),
        "--route prefix": replace(given, fleet=replace(two, route="prefix")),
    }
    assert [flags for flags, _ in policy_variants(BUSY, target)] == ["--batching continuous", "admission control"]
    best = replace(target, setup=replace(SETUP, fleet=replace(two, route="prefix")))
    assert not list(policy_variants(replace(BUSY, system=50), best))

"""Several engines: routing, failures, autoscaling, and prompts apart from answers."""

import math
from dataclasses import replace
from typing import Any

import pytest

from localllm.errors import DoesNotFit, UsageError
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.plan.parallel import Link
from localllm.routing import parse_replicas
from localllm.simulate.capacity import Capacity, Objective, enlarged, find_requirement
from localllm.simulate.cost import ScaledCost
from localllm.simulate.fleet import FleetSetup, parse_kills
from localllm.simulate.load import Lengths, LoadPlan, Turn
from localllm.simulate.report import Report, answer_lines
from localllm.simulate.simulation import EngineSetup, Simulated, simulate
from localllm.simulate.target import Target, roofline_target
from tests.plan.published import LLAMA_8B, header_of
from tests.simulate.engines import LinearCost

SETUP = EngineSetup(4000, 16, 512, 64, 4096, asynchronous=True)
LOAD = LoadPlan(rate=20.0, requests=300, prompt=Lengths(60, 0.8), output=Lengths(60, 0.9), max_len=1000)
CHATS = LoadPlan(
    rate=20.0,
    requests=600,
    turns=5,
    think_s=1.0,
    system=256,
    prompt=Lengths(150),
    output=Lengths(30),
    max_len=4000,
)


def run(load: LoadPlan = LOAD, setup: EngineSetup = SETUP, **fleet: Any) -> Simulated:
    if "replicas" in fleet:
        fleet.setdefault("most_replicas", fleet["replicas"])
    return simulate(load, replace(setup, fleet=FleetSetup(**fleet)), LinearCost())


def test_round_robin_splits_the_load() -> None:
    """Each of three replicas does exactly what an engine does that gets every third request."""
    fleet = run(route="round-robin", replicas=3)
    assert [replica.requests for replica in fleet.replicas] == [100, 100, 100]
    load, lasts = LOAD.start(), []
    turns = []
    while load.next_at() < math.inf:
        turns.append(load.pop())
    for first in range(3):
        own = LoadPlan(trace=tuple(turns[first::3]), requests=300)
        alone = simulate(own, SETUP, LinearCost())
        shift = turns[first].arrival  # a trace begins with its first request
        lasts += [last + shift for last in alone.records.last]
    assert sorted(fleet.records.last) == pytest.approx(sorted(lasts), rel=1e-9)
    assert fleet.requests == 300 and fleet.device_s == pytest.approx(3 * fleet.duration_s)


def test_least_load_avoids_a_busy_replica() -> None:
    uneven = replace(LOAD, rate=150.0, output=Lengths(60, 1.5), requests=600)
    load, turns = (run(uneven, route=route, replicas=4) for route in ("load", "round-robin"))
    assert load.percentiles("e2e")[1] < turns.percentiles("e2e")[1]


def test_prefix_routing_finds_more_in_the_caches() -> None:
    prefix, load = (run(CHATS, route=route, replicas=4) for route in ("prefix", "load"))
    shares = [each.cached_tokens / each.prompt_tokens for each in (prefix, load)]
    assert shares[0] > shares[1] + 0.1
    assert max(replica.requests for replica in prefix.replicas) < 300  # although all begin alike


def test_two_fronts_find_as_much_as_one_if_replicas_report() -> None:
    """In caches that hold a part of the conversations."""
    small, chats = replace(SETUP, blocks=900), replace(CHATS, rate=4.0, think_s=8.0)

    def share(**fleet: Any) -> float:
        ran = run(chats, small, route="prefix", replicas=4, **fleet)
        return ran.cached_tokens / ran.prompt_tokens

    one, alone, told = share(report_s=0.0), share(fronts=2, report_s=0.0), share(fronts=2)
    assert told > 0.98 * one > alone / 0.95
    assert share() > 0.98 * one  # what replicas have evicted makes one front no worse


def test_more_replicas_wait_less() -> None:
    busy = replace(LOAD, rate=200.0)
    waits = [run(busy, replicas=count).percentiles("queue")[1] for count in (1, 2, 4)]
    assert waits[0] > waits[1] >= waits[2]


@pytest.mark.parametrize("start_s", [0.0, 30.0])
def test_failure(start_s: float) -> None:
    """Every request is answered, breaks off or is sent again; the other replica has more while one starts."""
    busy = replace(LOAD, rate=50.0)
    killed = run(busy, replicas=2, kills=((1, 2.0),), start_s=start_s)
    assert killed.requests + killed.failed == 300 and killed.failed > 0
    calm = run(busy, replicas=2)
    assert killed.percentiles("e2e")[1] >= calm.percentiles("e2e")[1] or not start_s
    if start_s:
        assert killed.replicas[1].requests > 1.5 * killed.replicas[0].requests


def test_requests_wait_for_the_only_replica_to_start_again() -> None:
    killed = run(replicas=1, kills=((1, 2.0),), start_s=5.0)
    assert killed.requests + killed.failed == 300
    assert max(killed.measure("ttft")) == pytest.approx(5.0, abs=0.6)


def test_answers_wait_for_the_only_replica_that_computes_them() -> None:
    """Their prompts are computed meanwhile; what had begun breaks off, and is not sent again."""
    apart = {"replicas": 2, "prefill": 1, "link": Link(50e9), "token_bytes": 1e4}
    killed = run(replace(LOAD, rate=50.0), kills=((2, 2.0),), start_s=3.0, **apart)
    assert killed.requests + killed.failed == 300 == killed.transfers and killed.failed > 0 == killed.retried
    assert max(killed.measure("ttft")) < 0.5 and killed.percentiles("e2e")[1] > 3


def test_prompts_that_find_no_room_beside_answers_are_computed_again() -> None:
    load = LoadPlan(rate=200.0, requests=10, prompt=Lengths(800), output=Lengths(150), max_len=1000)
    apart = {"replicas": 2, "prefill": 1, "link": Link(50e9), "token_bytes": 1e4}
    busy, idle = (run(replace(load, rate=rate), replace(SETUP, blocks=60), **apart) for rate in (200.0, 0.5))
    assert busy.requests == idle.requests == busy.transfers == 10 and busy.output_tokens == idle.output_tokens
    assert busy.busy_s > idle.busy_s + 5 * 800 * 1e-4  # seconds of a prompt token


def test_a_replica_that_is_not_needed_ends_its_answer_and_comes_back() -> None:
    """Answers of 7000 tokens: six, three while one replica would suffice, and six again."""
    arrivals = [0.0] * 6 + [145.0] * 3 + [200.0] * 6
    turns = tuple(Turn(at, ((2 * i, 10),), 7000, 2 * i + 1) for i, at in enumerate(arrivals))
    load, setup = LoadPlan(trace=turns, requests=len(turns)), replace(SETUP, context=16_000)
    scaling = {"replicas": 1, "most_replicas": 3, "scale_target": 2.0, "route": "round-robin", "start_s": 5.0}
    scaled = run(load, setup, **scaling)
    lasts = sorted(scaled.records.last)
    third = scaled.replicas[2]
    assert len(scaled.replicas) == 3 and scaled.requests == 15 and third.requests == 1
    assert 150 < lasts[8] < 165  # after the decision to stop one, and before the next
    assert third.up_s == pytest.approx(lasts[8] - 15 + scaled.duration_s - 210, abs=0.01)
    killed = run(load, setup, kills=((3, 5.0), (3, 190.0)), **scaling)  # when it is not up
    assert killed.records == scaled.records and killed.failed == killed.retried == 0


REQUIRING = replace(LOAD, rate=300.0, requests=200)
APART = FleetSetup(2, 2, prefill=1, link=Link(50e9), token_bytes=1e5)


@pytest.mark.parametrize(
    ("fleet", "served", "needs"),
    [
        (FleetSetup(), 74.0, "3 replicas, or one with --second"),  # fewer than in proportion
        (FleetSetup(), 200.0, "3 replicas, or one with --second"),  # more
        (APART, 78.0, "6 replicas, 3 of them for prompts, or as many with --second"),
        (FleetSetup(1, 2, scale_target=8.0), 8.0, "as many with --second"),  # as all come at once
        (FleetSetup(256, 256), 200.0, "as many with --second"),
    ],
)
def test_what_a_load_above_the_capacity_needs(fleet: FleetSetup, served: float, needs: str) -> None:
    """served: requests/s, from which the search for the number of replicas begins"""
    made = roofline_target(header_of(LLAMA_8B), find_device("h100"), LoadOptions(4096), name="model")
    target = replace(made, setup=replace(SETUP, fleet=fleet), make_cost=LinearCost)
    objective = Objective({"ttft": 0.1})
    few = simulate(replace(REQUIRING, requests=2), target.setup, LinearCost())
    capacity = Capacity(served, few, 1)
    fast = replace(target, make_cost=lambda: ScaledCost(LinearCost(), 0.01))

    def too_large() -> Target:
        raise DoesNotFit("the model needs more memory")

    variants = [[("--first", too_large)], [("--second", lambda: fast)], [("--third", pytest.fail)]]
    found = find_requirement(REQUIRING, objective, target, capacity, variants)
    assert found and [each.serves for each in found.alternatives] == [False, True]
    if found.fleet:  # one less serves too little
        fleets = (found.fleet, enlarged(fleet, found.fleet.replicas - fleet.replicas))
        runs = [simulate(REQUIRING, replace(SETUP, fleet=each), LinearCost()) for each in fleets]
        assert [objective.is_met(each) for each in runs] == [True, False]
    text = " ".join(answer_lines(Report(target, REQUIRING, None, target.cost, few, objective, capacity, found)))
    assert (
        f"{served:g} requests/s within TTFT <= 100 ms for 95% of the requests; 300 requests/s need {needs}" in text
    )
    assert "--first: does not fit" in text and "--second: 100.0% of the requests" in text


def test_autoscaling() -> None:
    """Replicas are added while requests queue, take requests when they have started, and are stopped again."""
    burst = replace(LOAD, rate=120.0, requests=4500)
    scaled = run(burst, replicas=1, most_replicas=5, scale_target=20.0, start_s=10.0)
    fixed = run(burst, replicas=1)
    assert len(scaled.replicas) > 1 and scaled.requests == 4500
    assert scaled.percentiles("ttft")[1] < fixed.percentiles("ttft")[1]
    assert all(min(scaled.records.scheduled) >= 0 for _ in scaled.replicas)
    calm = run(replace(LOAD, rate=0.5, requests=400), replicas=1, most_replicas=5, scale_target=20.0)
    assert len(calm.replicas) == 1
    quieter = LoadPlan(
        trace=(*turns_of(burst), *later(turns_of(replace(LOAD, rate=0.5, requests=400)), 45.0)), requests=4900
    )
    stopped = run(quieter, replicas=1, most_replicas=5, scale_target=20.0, start_s=10.0)
    assert len(stopped.replicas) > 1 and stopped.replicas[-1].up_s < stopped.duration_s / 2


def turns_of(plan: LoadPlan) -> list:
    load, turns = plan.start(), []
    while load.next_at() < math.inf:
        turns.append(load.pop())
    return turns


def later(turns: list, seconds: float) -> list:
    return [turn._replace(arrival=turn.arrival + seconds) for turn in turns]


def test_prompts_apart_from_answers() -> None:
    """A lone request: its prompt on one engine, the transfer, and its answer on another."""
    load = LoadPlan(rate=1.0, requests=1, prompt=Lengths(1600), output=Lengths(50))
    link = Link(64e6, 0.25)
    apart = run(load, replicas=2, prefill=1, link=link, token_bytes=1e4)
    together = run(load)
    transfer_s = 0.25 + 1600 * 1e4 / 64e6
    assert apart.transfers == 1 and apart.transfer_s == pytest.approx(transfer_s)
    assert apart.percentiles("ttft")[0] == together.percentiles("ttft")[0]
    extra = apart.percentiles("e2e")[0] - together.percentiles("e2e")[0]
    assert extra == pytest.approx(transfer_s, rel=0.05)  # and the last token of the prompt is computed again
    assert apart.output_tokens == 50 and sum(apart.gaps.counts) == 49
    assert max(apart.gaps.seconds) == pytest.approx(transfer_s, rel=0.05)


def test_answers_are_even_if_prompts_are_apart() -> None:
    load = LoadPlan(rate=20.0, requests=400, prompt=Lengths(400, 0.5), output=Lengths(60, 0.5))
    apart = run(load, replicas=4, prefill=2, link=Link(50e9), token_bytes=1e5)
    together = run(load, replicas=4)
    assert apart.requests == together.requests == 400 == apart.transfers
    assert apart.percentiles("tpot")[1] < together.percentiles("tpot")[1]


@pytest.mark.parametrize(
    ("bandwidth", "seconds"),
    [(64e6, 10.0), (1.25e9, 0.512), (50e9, 0.0128), (450e9, 0.00142)],
)
def test_transfer_of_a_cache(bandwidth: float, seconds: float) -> None:
    """640 MB of keys and values, as 20,000 tokens of a 1B in 16 bits have, over links of different speeds."""
    assert Link(bandwidth).seconds(20_000 * 32_000) == pytest.approx(seconds, rel=0.01)


def test_flags() -> None:
    assert parse_replicas("4") == (4, 4) and parse_replicas("1..8") == (1, 8)
    assert parse_kills("1@60s,2@5m", 2) == ((1, 60.0), (2, 300.0))
    for text in ("0", "8..1", "x", "1..", "1000"):
        with pytest.raises(UsageError, match="--replicas"):
            parse_replicas(text)
    for text in ("3@60s", "1", "1@", "@5s"):
        with pytest.raises(UsageError, match="--kill"):
            parse_kills(text, 2)

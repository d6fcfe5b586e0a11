"""The schedule of a simulated run equals that of the product's engine, step for step, if both are given the same
durations of steps."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localllm.errors import UsageError
from localllm.metrics import Stopwatch
from localllm.request import Request, SamplingParams
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.runner import Runner
from localllm.runtime.sequence import Sequence
from localllm.runtime.step import Step, StepOutput, StepShape
from localllm.simulate.engine import Clock
from localllm.simulate.load import Lengths, LoadPlan, Turn
from localllm.simulate.simulation import EngineSetup, simulate
from localllm.simulate.tiers import NO_TIERS, TierSetup
from tests.simulate.engines import LinearCost, RecordingEngine, run_product, token
from tests.tiny import make_checkpoint, make_engine

setups = st.builds(
    EngineSetup,
    blocks=st.sampled_from((12, 40, 400)),
    block_size=st.sampled_from((4, 16)),
    token_budget=st.sampled_from((8, 64, 512)),
    max_running=st.sampled_from((1, 3, 32)),
    context=st.sampled_from((64, 400)),
    asynchronous=st.booleans(),
    max_answer=st.sampled_from((None, 200)),
    drafts=st.sampled_from((0, 0, 0, 3)),
    acceptance=st.sampled_from((0.0, 0.6, 1.0)),
    tiers=st.sampled_from((NO_TIERS, NO_TIERS, TierSetup(host_blocks=6), TierSetup(host_blocks=100))),
)
DISK = {"disk_blocks": 50, "disk_bandwidth": 1e6, "host_bandwidth": 1e7, "block_bytes": 2000.0}


@st.composite
def loads(draw: st.DrawFn) -> LoadPlan:
    closed = draw(st.booleans())
    return LoadPlan(
        rate=None if closed else draw(st.sampled_from((5.0, 50.0, 1000.0))),
        users=draw(st.integers(1, 12)) if closed else None,
        think_s=draw(st.sampled_from((0.0, 0.02, 1.0))) if closed else 0.0,
        burstiness=draw(st.sampled_from((1.0, 6.0))),
        turns=draw(st.sampled_from((1, 1, 3))),
        requests=draw(st.integers(1, 25)),
        prompt=Lengths(draw(st.sampled_from((2, 30, 90))), 0.9),
        output=Lengths(draw(st.sampled_from((1, 12, 40))), 0.7),
        system=draw(st.sampled_from((0, 0, 37))),
        seed=draw(st.integers(0, 9)),
        max_len=draw(st.sampled_from((60, 300))),
    )


def compare(plan: LoadPlan, setup: EngineSetup, *, one_by_one: bool = False) -> int:
    """Compare every step, and the times of every request; return the number of steps."""
    real = run_product(plan, setup, LinearCost(jitter=True))
    steps: list[list[tuple[int, int]]] = []
    simulated = simulate(
        plan, setup, LinearCost(jitter=True), lambda work, ends_at: steps.append(work), one_by_one=one_by_one
    )
    if one_by_one:
        assert steps == real.steps
    assert [sorted(step) for step in steps] == [sorted(step) for step in real.steps]
    records = simulated.records
    assert sorted(records.first) == sorted(real.first.values())
    assert sorted(records.last) == sorted(real.last.values())
    assert sum(records.cached) == sum(real.cached.values())
    assert simulated.preemptions == real.preemptions
    return len(steps)


# A preempted request finds its own blocks again, although no prompts begin alike.
@example(
    LoadPlan(rate=5.0, burstiness=6.0, requests=14, prompt=Lengths(2, 0.9), output=Lengths(40, 0.7), max_len=60),
    EngineSetup(12, 4, 8, 3, 64, asynchronous=False),
)
# A preempted request of an engine that launches a step ahead waits for blocks that are not cached yet.
@example(
    LoadPlan(users=5, think_s=0.02, requests=5, prompt=Lengths(2, 0.9), output=Lengths(40, 0.7), max_len=60),
    EngineSetup(12, 4, 8, 3, 64, asynchronous=True),
)
# Users whose requests are refused send the next ones while a step runs.
@example(
    LoadPlan(users=2, think_s=0.02, requests=13, prompt=Lengths(90, 0.9), output=Lengths(12, 0.7), max_len=60),
    EngineSetup(12, 4, 64, 1, 64, asynchronous=False),
)
@settings(max_examples=settings.default.max_examples * 6 // 5, deadline=None)
@given(loads(), setups)
def test_equals_product(plan: LoadPlan, setup: EngineSetup) -> None:
    if plan.turns > 1:  # no answer is cut that a later turn repeats
        plan = replace(plan, max_len=min(plan.max_len, setup.capacity))
    if all(plan_turn_fits(turn, setup) for turn in first_turns(plan)):
        compare(plan, setup)
        compare(plan, setup, one_by_one=True)


def first_turns(plan: LoadPlan) -> list[Turn]:
    load = plan.start()
    return [load.pop()] if load.next_at() < float("inf") else []


def plan_turn_fits(turn: Turn, setup: EngineSetup) -> bool:
    """Return whether a request is answered at all; otherwise the simulation refuses the load."""
    return turn.prompt_len < setup.capacity


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("blocks", [30, 120, 4000])
def test_busy_engine(asynchronous: bool, blocks: int) -> None:
    """Hundreds of requests, with preemption, prefix hits and evictions where blocks are few."""
    setup = EngineSetup(blocks, 16, 256, 24, 400, asynchronous)
    plan = LoadPlan(
        rate=40.0, turns=3, requests=200, prompt=Lengths(60, 0.8), output=Lengths(40, 0.6), system=70, max_len=390
    )
    assert compare(plan, setup) > 500


# The group is dissolved while the prompt of a member is in flight, which no other prompt may find yet.
@example(
    plan=LoadPlan(
        rate=5.0, requests=3, prompt=Lengths(2, 0.9), output=Lengths(1, 0.7), system=37, seed=1, max_len=60
    ),
    setup=EngineSetup(12, 16, 64, 3, 64, asynchronous=True),
    batching="static",
    shortest=True,
    admission=False,
    disk=False,
)
# It is dissolved while a step is in flight that fills a block of a member, which is preempted later.
@example(
    plan=LoadPlan(
        users=12, turns=3, requests=10, prompt=Lengths(2, 0.9), output=Lengths(40, 0.7), system=5, seed=791
    ),
    setup=EngineSetup(20, 16, 64, 32, 40, asynchronous=True),
    batching="continuous",
    shortest=True,
    admission=False,
    disk=False,
)
# A sequence is preempted while its last token is computed, and must not be admitted again.
@example(
    plan=LoadPlan(
        rate=50.0, requests=8, prompt=Lengths(10, 0.9), output=Lengths(12, 0.7), system=5, seed=622, max_len=40
    ),
    setup=EngineSetup(20, 4, 8, 3, 40, asynchronous=True),
    batching="continuous",
    shortest=True,
    admission=False,
    disk=False,
)
# The last request of a batch takes the rest of the budget, so that nothing is left to ask whether others fit.
@example(
    plan=LoadPlan(
        users=5, think_s=0.02, turns=3, requests=22, prompt=Lengths(2, 0.9), output=Lengths(12, 0.7), seed=802
    ),
    setup=EngineSetup(14, 16, 20, 3, 40, asynchronous=False),
    batching="dynamic",
    shortest=False,
    admission=False,
    disk=False,
)
# A block leaves for the disk, and takes along those behind it, which a member of the group has just filled.
@example(
    plan=LoadPlan(
        users=5, requests=16, prompt=Lengths(10, 0.9), output=Lengths(40, 0.7), system=5, seed=502, max_len=300
    ),
    setup=EngineSetup(17, 4, 64, 32, 40, asynchronous=True),
    batching="continuous",
    shortest=True,
    admission=False,
    disk=True,
)
# A block leaves for the disk in one of many decode steps that are skipped, at the time of that step.
@example(
    plan=LoadPlan(
        rate=1000.0, turns=3, requests=24, prompt=Lengths(10, 0.9), output=Lengths(12, 0.7), seed=54, max_len=300
    ),
    setup=EngineSetup(17, 4, 8, 3, 64, asynchronous=True),
    batching="continuous",
    shortest=False,
    admission=True,
    disk=True,
)
@settings(max_examples=settings.default.max_examples * 3 // 5, deadline=None)
@given(
    loads(),
    setups,
    st.sampled_from(("static", "dynamic", "continuous")),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_group_equals_single_sequences(
    plan: LoadPlan, setup: EngineSetup, batching: str, shortest: bool, admission: bool, disk: bool
) -> None:
    """Decoding sequences are scheduled as a group exactly as one by one, by the schedulers for comparison too."""
    setup = replace(
        setup,
        batching=batching,
        order="shortest" if shortest else "fcfs",
        admission=admission,
        max_wait_s=0.05,
        batch_size=4,
        tiers=replace(setup.tiers, **DISK) if disk else setup.tiers,
    )
    if plan_turn_fits(first_turns(plan)[0], setup):
        grouped, single = (outcome(plan, setup, one_by_one=one_by_one) for one_by_one in (False, True))
        assert grouped == single


def outcome(plan: LoadPlan, setup: EngineSetup, *, one_by_one: bool) -> Any:
    """Return the steps of a simulation, the times of its requests and its gaps between tokens, or its error."""
    steps: list[list[tuple[int, int]]] = []
    try:
        simulated = simulate(
            plan,
            setup,
            LinearCost(jitter=True),
            lambda work, ends_at: steps.append(sorted(work)),
            one_by_one=one_by_one,
        )
    except UsageError as error:
        return str(error)
    records, gaps = simulated.records, Counter[float]()
    for seconds, count in zip(simulated.gaps.seconds, simulated.gaps.counts, strict=True):
        gaps[seconds] += count
    times = (list(records.first), list(records.last), list(records.cached), list(records.scheduled))
    return steps, times, gaps, simulated.output_tokens, simulated.preemptions, simulated.most_running


class TimedModel:
    """A runner of a model, on a clock that advances by what a cost says."""

    def __init__(self, runner: Runner, clock: Clock, cost: LinearCost):
        self.runner, self.clock, self.cost, self.number = runner, clock, cost, 0
        self.shape: StepShape | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, step: Step) -> StepOutput:
        assert self.shape
        self.clock.now += self.cost.seconds(self.shape, self.number)
        self.number += 1
        return self.runner.run(step)


@pytest.mark.slow
def test_equals_engine_with_a_model(tmp_path: Path) -> None:
    """The same with a runner that computes a random Llama: prompts in chunks, batches and preemption."""
    make_checkpoint(tmp_path, "Llama")
    blocks, context = 12, 150
    setup = EngineSetup(blocks, 16, 48, 6, context, asynchronous=False)
    plan = LoadPlan(rate=60.0, requests=40, prompt=Lengths(20, 0.8), output=Lengths(60, 0.5), max_len=context)
    clock, load = Clock(), plan.start()
    timed = TimedModel(make_engine(tmp_path, blocks=blocks, block_size=16).runner, clock, LinearCost(jitter=True))
    engine = RecordingEngine(timed, BlockPool(blocks, 16), 48, 6, clock=clock)  # type: ignore[arg-type]
    engine.schedule_log = []
    last: dict[int, float] = {}
    number = 0
    with torch.inference_mode():
        while engine.has_unfinished_requests or load.next_at() < math.inf:
            if not engine.has_unfinished_requests:
                clock.now = max(clock.now, load.next_at())
            while load.next_at() <= clock.now:
                turn, number = load.pop(), number + 1
                ids = tuple(3 + token(number, i) % 300 for i in range(turn.prompt_len))
                params = SamplingParams(temperature=0, max_tokens=turn.answer_len, ignore_eos=True)
                request = Request(ids, params, turn.arrival, id=number)
                watch = Stopwatch(turn.arrival, clock=clock)
                engine.add_sequence(Sequence(request, 0, frozenset(), len(ids) + turn.answer_len, watch))
            for event in engine.step():
                last[event.sequence.request.id] = clock.now
    steps: list[list[tuple[int, int]]] = []
    cost = LinearCost(jitter=True)
    simulated = simulate(plan, setup, cost, lambda work, ends_at: steps.append(work))
    assert [sorted(step) for step in steps] == [sorted(step) for step in engine.schedule_log]
    assert sorted(simulated.records.last) == sorted(last.values())
    assert simulated.preemptions == engine.scheduler.preemptions > 0

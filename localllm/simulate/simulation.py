"""Runs a load on a simulated engine, and measures it as `localllm.metrics` defines."""

import gc
import math
import time
from array import array
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from localllm.errors import UsageError
from localllm.metrics import Stopwatch
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.simulate.cost import Cost
from localllm.simulate.engine import Clock, SimulatedDrafter, SimulatedEngine, TokenGaps
from localllm.simulate.load import LoadPlan, Turn
from localllm.simulate.policies import BatchScheduler, CountingBlockPool, SimulatedScheduler
from localllm.simulate.sequence import SimulatedSequence

OnStep = Callable[[list[tuple[int, int]], float], object]  # scheduled (request, tokens), and when the step ends
PERCENTILES = (50, 95, 99)
MAX_POINTS = 2000  # of a timeline
MEASURES = ("queue", "ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class EngineSetup:
    """The engine of a simulation, with the policies that it is to follow."""

    blocks: int
    block_size: int
    token_budget: int  # most tokens of a step
    max_running: int
    context: int  # most tokens of a sequence
    asynchronous: bool  # steps are launched ahead, as on a GPU
    state_slots: int = 0  # of recurrent layers
    batching: str = "continuous"
    batch_size: int = 8  # of static and dynamic batching
    max_wait_s: float = 0.1  # of dynamic batching
    order: str = "fcfs"
    admission: bool = True  # reserve blocks for answers before requests start
    prefix_caching: bool = True
    drafts: int = 0  # tokens per sequence and step
    acceptance: float = 0.0  # probability that a draft token is accepted, if those before it are
    max_answer: int | None = None  # limit that requests state; None: their own length
    seed: int = 0

    @property
    def capacity(self) -> int:
        """Most tokens of a request, which the cache must hold as a whole."""
        return min(self.context, self.blocks * self.block_size)

    @property
    def is_product(self) -> bool:
        """Whether all policies are those of the product."""
        return self.batching == "continuous" and self.order == "fcfs" and self.admission


@dataclass
class Records:
    """Numbers of each answered request, in order of their ends, in seconds and tokens."""

    arrival: "array[float]" = field(default_factory=lambda: array("d"))
    scheduled: "array[float]" = field(default_factory=lambda: array("d"))
    first: "array[float]" = field(default_factory=lambda: array("d"))  # token
    last: "array[float]" = field(default_factory=lambda: array("d"))
    prompt: "array[int]" = field(default_factory=lambda: array("q"))
    cached: "array[int]" = field(default_factory=lambda: array("q"))
    output: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, sequence: SimulatedSequence) -> None:
        self.arrival.append(sequence.request.arrival)
        self.scheduled.append(sequence.stopwatch.scheduled or 0.0)
        self.first.append(sequence.first_token_at)
        self.last.append(sequence.last_token_at)
        self.prompt.append(sequence.prompt_len)
        self.cached.append(sequence.cached_tokens or 0)
        self.output.append(sequence.produced)


class Timeline:
    """The engine's state over time: at most MAX_POINTS moments, evenly spread over its steps."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int, int]] = []  # seconds, running, waiting, used blocks
        self.stride = 1
        self.skipped = 0

    def add(self, now: float, engine: SimulatedEngine) -> None:
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped = 0
        scheduler, pool = engine.scheduler, engine.pool
        self.points.append((now, scheduler.running_count, len(scheduler.waiting), pool.count - pool.free_count))
        if len(self.points) > MAX_POINTS:
            del self.points[::2]
            self.stride *= 2


@dataclass(frozen=True)
class Simulated:
    """A simulated run."""

    records: Records
    gaps: TokenGaps
    timeline: Timeline
    duration_s: float  # of the simulated time, from the first arrival to the last token
    busy_s: float  # of it, in which a step was running
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    most_running: int
    most_waiting: int
    refused: int  # requests that are longer than the context, or than the whole cache
    bytes_read: float | None  # by all steps; None if the cost does not know
    operations: float | None
    wall_s: float  # that the simulation took

    @property
    def requests(self) -> int:
        return len(self.records.arrival)

    def measure(self, name: str) -> np.ndarray:
        """Return the values of one of MEASURES except `itl`, of each request; NaN for TPOT of a single token."""
        r = self.records
        arrival, first, last = (
            np.frombuffer(each) if len(each) else np.empty(0) for each in (r.arrival, r.first, r.last)
        )
        if name == "queue":
            return np.frombuffer(r.scheduled) - arrival if len(arrival) else arrival
        if name == "ttft":
            return first - arrival
        if name == "e2e":
            return last - arrival
        gaps = np.array(r.output, dtype=np.float64) - 1
        return np.divide(last - first, gaps, out=np.full(len(gaps), math.nan), where=gaps > 0)

    def percentiles(self, name: str) -> tuple[float, ...]:
        """Return the PERCENTILES of a measure; NaN without values."""
        if name == "itl":
            return weighted_percentiles(np.array(self.gaps.seconds), np.array(self.gaps.counts), PERCENTILES)
        values = self.measure(name)
        values = values[~np.isnan(values)]
        if not len(values):
            return (math.nan,) * len(PERCENTILES)
        return tuple(float(v) for v in np.percentile(values, PERCENTILES))

    def met(self, limits: dict[str, float]) -> int:
        """Return how many requests meet every limit; an answer of one token has no TPOT and meets it."""
        ok = np.ones(self.requests, dtype=bool)
        for name, limit in limits.items():
            values = self.measure(name)
            ok &= np.isnan(values) | (values <= limit)
        return int(ok.sum())


def weighted_percentiles(values: np.ndarray, counts: np.ndarray, percents: tuple[int, ...]) -> tuple[float, ...]:
    """Return percentiles of values that occur `counts` times each: the smallest that as many do not exceed."""
    if not len(values):
        return (math.nan,) * len(percents)
    order = np.argsort(values)
    cumulative = np.cumsum(counts[order])
    ranks = np.array(percents) / 100 * (cumulative[-1] - 1)
    return tuple(float(v) for v in values[order][np.searchsorted(cumulative, ranks, side="right")])


def make_engine(
    setup: EngineSetup,
    cost: Cost,
    clock: Clock,
    on_finish: Callable[[SimulatedSequence], object],
    on_step: OnStep | None = None,
    *,
    shares_prefixes: bool = True,
    one_by_one: bool = False,
) -> SimulatedEngine:
    """shares_prefixes: whether any two prompts begin alike; on_step, one_by_one: as in `SimulatedEngine`"""
    pool_class = BlockPool if setup.prefix_caching and shares_prefixes else CountingBlockPool
    engine = SimulatedEngine(
        clock,
        cost,
        pool_class(setup.blocks, setup.block_size, setup.state_slots),
        setup.token_budget,
        setup.max_running,
        asynchronous=setup.asynchronous,
        on_finish=on_finish,
        drafter=SimulatedDrafter(setup.drafts, setup.acceptance, setup.seed) if setup.drafts else None,
        on_step=on_step,
        one_by_one=one_by_one,
    )
    if setup.is_product:
        return engine
    scheduler_class = SimulatedScheduler if setup.batching == "continuous" else BatchScheduler
    scheduler = scheduler_class(engine.pool, setup.token_budget, setup.max_running, engine.scheduler.chunk_policy)
    scheduler.admits_by_reservation = setup.admission
    scheduler.shortest_first = setup.order == "shortest"
    if isinstance(scheduler, BatchScheduler):
        scheduler.batch_size, scheduler.context, scheduler.batcher = setup.batch_size, setup.context, engine
        scheduler.max_wait_s = setup.max_wait_s if setup.batching == "dynamic" else math.inf
    engine.use_scheduler(scheduler)
    return engine


def simulate(
    load_plan: LoadPlan, setup: EngineSetup, cost: Cost, on_step: OnStep | None = None, *, one_by_one: bool = False
) -> Simulated:
    """Run a load until its last request is answered. Raises UsageError if no request can be answered.

    on_step, one_by_one: as in `SimulatedEngine`
    """
    started = time.perf_counter()
    if not load_plan.shares_prefixes or not setup.prefix_caching:
        # Blocks need not be told apart, unless a preempted request finds its own in the prefix cache again.
        steps: list[tuple[list[tuple[int, int]], float]] = []
        record = None if on_step is None else lambda work, ends_at: steps.append((work, ends_at))
        simulated = run(load_plan, setup, cost, record, started, shares_prefixes=False, one_by_one=one_by_one)
        if simulated:
            if on_step:
                for step in steps:
                    on_step(*step)
            return simulated
    simulated = run(load_plan, setup, cost, on_step, started, shares_prefixes=True, one_by_one=one_by_one)
    assert simulated
    return simulated


def run(
    load_plan: LoadPlan,
    setup: EngineSetup,
    cost: Cost,
    on_step: OnStep | None,
    started: float,
    *,
    shares_prefixes: bool,
    one_by_one: bool,
) -> Simulated | None:
    """Run a load; None if `shares_prefixes` turns out to be wrong."""
    clock, load, records, timeline = Clock(), load_plan.start(), Records(), Timeline()

    def finish(sequence: SimulatedSequence) -> None:
        records.add(sequence)
        load.answered(cast(Turn, sequence.turn), clock.now)

    engine = make_engine(
        setup, cost, clock, finish, on_step, shares_prefixes=shares_prefixes, one_by_one=one_by_one
    )
    scheduler = engine.scheduler
    batches = scheduler if isinstance(scheduler, BatchScheduler) else None
    first_at, number, refused, most_running, most_waiting = load.next_at(), 0, 0, 0, 0
    capacity = setup.capacity
    totals_before = cost.totals()
    with paused_collector():
        while True:
            while load.next_at() <= clock.now:
                turn = load.pop()
                number += 1
                if sequence := make_sequence(turn, number, setup, capacity, clock):
                    engine.add_sequence(sequence)
                else:
                    refused += 1
                    load.answered(turn, clock.now)
            next_at = load.next_at()
            if not engine.has_unfinished_requests:
                if next_at == math.inf:
                    break
                clock.now = max(clock.now, next_at)
                continue
            if batches:
                batches.closed = next_at == math.inf
            if len(scheduler.waiting) > most_waiting:
                most_waiting = len(scheduler.waiting)
            timeline.add(clock.now, engine)
            if engine.advance(next_at):
                continue
            before, launched = clock.now, engine.steps
            engine.step()
            if scheduler.preemptions and setup.prefix_caching and not shares_prefixes:
                return None
            most_running = max(most_running, scheduler.running_count)
            if engine.steps == launched and engine.in_flight is None and clock.now == before:
                # Nothing can run: a batch waits to be filled.
                wake_at = batches.wake_at() if batches and not batches.closed else math.inf
                if (later := min(next_at, wake_at)) == math.inf:
                    raise UsageError(
                        "the waiting requests do not fit into the cache",
                        "use a larger --cache-tokens",
                    )
                clock.now = max(clock.now, later)
    if not records.arrival:
        raise UsageError(
            f"all {refused} requests are longer than the {capacity} tokens that fit", "use a longer --context"
        )
    totals = cost.totals()
    return Simulated(
        records=records,
        gaps=engine.gaps,
        timeline=timeline,
        duration_s=clock.now - first_at,
        busy_s=engine.busy_s,
        steps=engine.steps,
        preemptions=scheduler.preemptions,
        prompt_tokens=scheduler.prompt_tokens,
        cached_tokens=scheduler.cached_tokens,
        output_tokens=sum(records.output),
        draft_tokens=engine.draft_tokens,
        accepted_tokens=engine.accepted_tokens,
        most_running=most_running,
        most_waiting=most_waiting,
        refused=refused,
        bytes_read=totals[0] - totals_before[0] if totals and totals_before else None,
        operations=totals[1] - totals_before[1] if totals and totals_before else None,
        wall_s=time.perf_counter() - started,
    )


def make_sequence(
    turn: Turn, number: int, setup: EngineSetup, capacity: int, clock: Clock
) -> SimulatedSequence | None:
    """Return the sequence of a request; None if the prompt alone is too long. Answers end with the context."""
    prompt_len = turn.prompt_len
    if not prompt_len or prompt_len >= capacity:
        return None
    answer_len = min(turn.answer_len, capacity - prompt_len)
    limit = answer_len if setup.max_answer is None else max(answer_len, setup.max_answer)
    return SimulatedSequence(
        number,
        turn.arrival,
        turn.prompt,
        answer_len,
        min(prompt_len + limit, capacity),
        Stopwatch(turn.arrival, clock=clock),
        turn.answer_id,
        turn=turn,
    )


@contextmanager
def paused_collector():
    """Pause the cyclic garbage collector, which would visit all running sequences again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

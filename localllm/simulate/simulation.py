"""Runs a load on a simulated engine, and measures it as `localllm.metrics` defines."""

import gc
import math
import time
from array import array
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from localllm.errors import UsageError
from localllm.metrics import Stopwatch
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.simulate.cost import Cost
from localllm.simulate.engine import Clock, SimulatedDrafter, SimulatedEngine, TokenGaps
from localllm.simulate.fleet import Fleet, FleetSetup, Request
from localllm.simulate.load import LoadPlan
from localllm.simulate.policies import BatchScheduler, CountingBlockPool, SimulatedScheduler
from localllm.simulate.sequence import SimulatedSequence
from localllm.simulate.tiers import NO_TIERS, DiskContent, NamedBlockPool, SimulatedDisk, TierSetup

OnStep = Callable[[list[tuple[int, int]], float], object]  # scheduled (request, tokens), and when the step ends
PERCENTILES = (50, 95, 99)
MAX_POINTS = 2000  # of a timeline
MEASURES = ("queue", "ttft", "tpot", "itl", "e2e")

ONE_REPLICA = FleetSetup()


@dataclass(frozen=True)
class EngineSetup:
    """The engine of a simulation, with the policies that it is to follow."""

    blocks: int
    block_size: int
    token_budget: int  # maximum tokens per step
    max_running: int
    context: int  # maximum tokens per sequence
    asynchronous: bool  # steps are launched ahead, as on a GPU
    entry_s: float = 0.0  # from the arrival of a request until the engine may schedule it
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
    fleet: FleetSetup = ONE_REPLICA
    tiers: TierSetup = NO_TIERS

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a request: the cache must hold all of them."""
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

    def add(self, sequence: SimulatedSequence, prefilled: SimulatedSequence | None = None) -> None:
        """prefilled: the sequence that computed the prompt and the first token, if that was another one"""
        first = prefilled or sequence
        self.arrival.append(first.request.arrival)
        self.scheduled.append(first.stopwatch.scheduled or 0.0)
        self.first.append(first.first_token_at)
        self.last.append(sequence.last_token_at)
        self.prompt.append(first.prompt_len)
        self.cached.append(first.cached_tokens or 0)
        self.output.append(sequence.produced + (prefilled.produced if prefilled else 0))

    def measure(self, name: str) -> np.ndarray:
        """Return the values of one of MEASURES except `itl`, of each request; NaN for TPOT of a single token."""
        arrival, first, last = (
            np.frombuffer(each) if len(each) else np.empty(0) for each in (self.arrival, self.first, self.last)
        )
        if name == "queue":
            return np.frombuffer(self.scheduled) - arrival if len(arrival) else arrival
        if name == "ttft":
            return first - arrival
        if name == "e2e":
            return last - arrival
        gaps = np.array(self.output, dtype=np.float64) - 1
        return np.divide(last - first, gaps, out=np.full(len(gaps), math.nan), where=gaps > 0)

    def met(self, limits: dict[str, float]) -> int:
        """Return how many requests meet every limit; an answer of one token has no TPOT and meets it."""
        ok = np.ones(len(self.arrival), dtype=bool)
        for name, limit in limits.items():
            values = self.measure(name)
            ok &= np.isnan(values) | (values <= limit)
        return int(ok.sum())


class Timeline:
    """The engine's state over time: at most MAX_POINTS moments, evenly spread over its steps."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int, int]] = []  # seconds, running, waiting, used blocks
        self.stride = 1
        self.skipped = 0

    def add(self, now: float, engines: list[SimulatedEngine]) -> None:
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped = 0
        running = sum(engine.scheduler.running_count for engine in engines)
        waiting = sum(len(engine.scheduler.waiting) for engine in engines)
        self.points.append((now, running, waiting, sum(e.pool.count - e.pool.free_count for e in engines)))
        if len(self.points) > MAX_POINTS:
            del self.points[::2]
            self.stride *= 2


@dataclass(frozen=True)
class ReplicaUse:
    """The use of a replica."""

    requests: int  # that were sent to it
    up_s: float  # seconds, from its start


class BlocksMatter(Exception):
    """A preempted request may find its own blocks in the prefix cache."""


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
    bytes_read: float | None  # by all steps; None if the cost model does not count them
    operations: float | None
    wall_s: float  # that the simulation took
    replicas: tuple[ReplicaUse, ...] = ()
    failed: int = 0  # requests that had a token when their replica failed
    retried: int = 0  # requests that were sent again, because they had none
    transfers: int = 0  # of keys and values
    transferred_bytes: float = 0.0
    transfer_s: float = 0.0  # of all transfers, with the wait for those before
    host_tokens: int = 0  # of the cached ones: from main memory
    disk_tokens: int = 0  # of the cached ones: from the disk
    moved_blocks: int = 0  # between device and main memory
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    unwritten_blocks: int = 0  # because the disk was too slow
    slower_loads: int = 0  # prefixes on the disk that were computed, because that was faster

    @property
    def device_s(self) -> float:
        """Seconds for which replicas were up, summed."""
        return sum(replica.up_s for replica in self.replicas)

    @property
    def requests(self) -> int:
        return len(self.records.arrival)

    def measure(self, name: str) -> np.ndarray:
        """Return values as `Records.measure` does."""
        return self.records.measure(name)

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
        """Return a number of requests as `Records.met` does."""
        return self.records.met(limits)


class Observer(Protocol):
    """Observes a run while it is in progress. Any method may raise to end the run."""

    def started(self, fleet: Fleet, records: Records) -> None:
        """A run begins, possibly again, if the previous one made a wrong assumption."""

    def finished(self, sequence: SimulatedSequence, prefilled: SimulatedSequence | None) -> None:
        """A request is answered. prefilled: as in `Records.add`"""

    def step(self, now: float) -> None:
        """Time has passed on a replica: that of a step, or of several without a decision between them."""

    def ended(self, now: float) -> None: ...


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
    number: int = 1,
    disk: DiskContent | None = None,
) -> SimulatedEngine:
    """shares_prefixes: whether any two prompts begin alike; disk: what its disk tier has; others: as in
    `SimulatedEngine`"""
    sizes = setup.blocks, setup.block_size, setup.state_slots
    if not (setup.prefix_caching and shares_prefixes):
        pool = CountingBlockPool(*sizes)
    elif disk:
        pool = NamedBlockPool(*sizes, setup.tiers.host_blocks)
        SimulatedDisk(setup.tiers, pool, disk, clock)
    else:
        pool = BlockPool(*sizes, setup.tiers.host_blocks)
    engine = SimulatedEngine(
        clock,
        cost,
        pool,
        setup.token_budget,
        setup.max_running,
        asynchronous=setup.asynchronous,
        on_finish=on_finish,
        drafter=SimulatedDrafter(setup.drafts, setup.acceptance, setup.seed) if setup.drafts else None,
        on_step=on_step,
        one_by_one=one_by_one,
        number=number,
        tiers=setup.tiers,
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
    load_plan: LoadPlan,
    setup: EngineSetup,
    cost: Cost,
    on_step: OnStep | None = None,
    *,
    one_by_one: bool = False,
    observer: Observer | None = None,
) -> Simulated:
    """Run a load until its last request is answered. Raises UsageError if no request can be answered.

    on_step, one_by_one: as in `SimulatedEngine`
    """
    started = time.perf_counter()
    fleet = setup.fleet
    has_tiers = setup.tiers != NO_TIERS and setup.prefix_caching  # whose moves take time in any case
    if not fleet.prefill and not has_tiers and not (load_plan.shares_prefixes and setup.prefix_caching):
        # Blocks need not be distinguished, unless a preempted request finds its own in the prefix cache again.
        steps: list[tuple[list[tuple[int, int]], float]] = []
        record = None if on_step is None else lambda work, ends_at: steps.append((work, ends_at))
        try:
            simulated = run(
                load_plan,
                setup,
                cost,
                record,
                started,
                shares_prefixes=False,
                one_by_one=one_by_one,
                observer=observer,
            )
        except BlocksMatter:
            pass
        else:
            if on_step:
                for step in steps:
                    on_step(*step)
            return simulated
    return run(
        load_plan,
        setup,
        cost,
        on_step,
        started,
        shares_prefixes=True,
        one_by_one=one_by_one,
        observer=observer,
    )


class Recorder:
    """Records a run while it is in progress."""

    def __init__(self, *, ends_at_preemption: bool, observer: Observer | None):
        """ends_at_preemption: because blocks were not distinguished"""
        self.ends_at_preemption = ends_at_preemption
        self.observer = observer
        self.records = Records()
        self.timeline = Timeline()
        self.transfer_gaps = TokenGaps()  # between the first token of one engine and the next of another
        self.most_running = self.most_waiting = 0

    def finished(self, sequence: SimulatedSequence, prefilled: SimulatedSequence | None) -> None:
        """Record an answered request. prefilled: as in `Records.add`"""
        self.records.add(sequence, prefilled)
        if self.observer:
            self.observer.finished(sequence, prefilled)
        if prefilled:
            self.transfer_gaps.add(sequence.first_token_at - prefilled.first_token_at)

    def stepped(self, now: float, fleet: Fleet) -> None:
        """Record the state of a fleet. Raises BlocksMatter."""
        running = waiting = 0
        for replica in fleet.replicas:
            scheduler = replica.engine.scheduler
            running += scheduler.running_count
            waiting += len(scheduler.waiting)
            if scheduler.preemptions and self.ends_at_preemption:
                raise BlocksMatter
        self.most_running, self.most_waiting = max(self.most_running, running), max(self.most_waiting, waiting)
        self.timeline.add(now, [replica.engine for replica in fleet.replicas])
        if self.observer:
            self.observer.step(now)


def run(
    load_plan: LoadPlan,
    setup: EngineSetup,
    cost: Cost,
    on_step: OnStep | None,
    started: float,
    *,
    shares_prefixes: bool,
    one_by_one: bool,
    observer: Observer | None,
) -> Simulated:
    """Run a load. started: on `perf_counter`. Raises BlocksMatter if `shares_prefixes` turns out to be wrong."""
    load, capacity, apart = load_plan.start(), setup.capacity, setup.fleet.prefill > 0
    recorder = Recorder(ends_at_preemption=setup.prefix_caching and not shares_prefixes, observer=observer)
    disks: dict[int, DiskContent] = {}  # by number of the replica, which keeps its own when it fails

    def engine_of(number: int, clock: Clock, on_finish: Callable[[SimulatedSequence], object]) -> SimulatedEngine:
        return make_engine(
            setup,
            cost,
            clock,
            on_finish,
            on_step,
            shares_prefixes=shares_prefixes,
            one_by_one=one_by_one,
            number=number,
            disk=disks.setdefault(number, DiskContent()) if setup.tiers.disk_blocks else None,
        )

    def sequence_of(request: Request, clock: Clock) -> SimulatedSequence | None:
        return make_sequence(request, setup, capacity, clock, apart=apart)

    first_at, totals_before = load.next_at(), cost.totals()
    with paused_collector():
        fleet = Fleet(
            setup.fleet, load, engine_of, sequence_of, recorder.finished, recorder.stepped, setup.entry_s
        )
        if observer:
            observer.started(fleet, recorder.records)
        fleet.run()
    if not recorder.records.arrival:
        raise UsageError(
            f"all {fleet.refused} requests are longer than the {capacity} tokens that fit",
            "use a longer --context",
        )
    ended = fleet.end()
    recorder.stepped(ended, fleet)
    if observer:
        observer.ended(ended)
    totals = cost.totals()
    work = (totals[0] - totals_before[0], totals[1] - totals_before[1]) if totals and totals_before else None
    return summarize(recorder, fleet, duration_s=ended - first_at, work=work, wall_s=time.perf_counter() - started)


def summarize(
    recorder: Recorder, fleet: Fleet, *, duration_s: float, work: tuple[float, float] | None, wall_s: float
) -> Simulated:
    """Return the numbers of a run that has ended. work: bytes read and operations; others: as in `Simulated`"""
    engines, schedulers = fleet.engines, [engine.scheduler for engine in fleet.engines]
    prompts = schedulers  # that compute prompts
    if fleet.setup.prefill:
        prompts = [replica.engine.scheduler for replica in fleet.replicas[: fleet.setup.prefill]]
    disks = [engine.disk for engine in engines if engine.disk]
    return Simulated(
        records=recorder.records,
        gaps=TokenGaps.joined([*(engine.gaps for engine in engines), recorder.transfer_gaps]),
        timeline=recorder.timeline,
        duration_s=duration_s,
        busy_s=sum(engine.busy_s for engine in engines),
        steps=sum(engine.steps for engine in engines),
        preemptions=sum(scheduler.preemptions for scheduler in schedulers),
        prompt_tokens=sum(scheduler.prompt_tokens for scheduler in prompts),
        cached_tokens=sum(scheduler.cached_tokens for scheduler in prompts),
        output_tokens=sum(recorder.records.output),
        draft_tokens=sum(engine.draft_tokens for engine in engines),
        accepted_tokens=sum(engine.accepted_tokens for engine in engines),
        most_running=recorder.most_running,
        most_waiting=recorder.most_waiting,
        refused=fleet.refused,
        bytes_read=work and work[0],
        operations=work and work[1],
        wall_s=wall_s,
        replicas=tuple(ReplicaUse(replica.requests, replica.up_s) for replica in fleet.replicas),
        failed=fleet.failed,
        retried=fleet.retried,
        transfers=fleet.transfers,
        transferred_bytes=fleet.transferred_bytes,
        transfer_s=fleet.transfer_s,
        host_tokens=sum(scheduler.host_tokens for scheduler in prompts),
        disk_tokens=sum(scheduler.disk_tokens for scheduler in prompts),
        moved_blocks=sum(engine.moved_blocks for engine in engines),
        disk_read_bytes=sum(disk.counts.read_bytes for disk in disks),
        disk_written_bytes=sum(disk.counts.written_bytes for disk in disks),
        unwritten_blocks=sum(disk.counts.skipped_segments for disk in disks),
        slower_loads=sum(disk.counts.slower_loads for disk in disks),
    )


def make_sequence(
    request: Request, setup: EngineSetup, capacity: int, clock: Clock, *, apart: bool
) -> SimulatedSequence | None:
    """Return the sequence of a request; None if the prompt alone is too long. Answers end with the context.

    apart: a first engine computes the prompt and one token, and a second one the rest of the answer
    """
    turn = request.turn
    prompt, prompt_len = turn.prompt, turn.prompt_len
    if not prompt_len or prompt_len >= capacity:
        return None
    answer_len = min(turn.answer_len, capacity - prompt_len)
    if request.prefilled:
        prompt, prompt_len, answer_len = (*prompt, (turn.answer_id, 1)), prompt_len + 1, answer_len - 1
    elif apart:
        answer_len = 1
    limit = answer_len if setup.max_answer is None else max(answer_len, setup.max_answer)
    return SimulatedSequence(
        request.number,
        turn.arrival,
        prompt,
        answer_len,
        min(prompt_len + limit, capacity),
        Stopwatch(turn.arrival, clock=clock),
        turn.answer_id,
        prefix_names=request.prefix_names,
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

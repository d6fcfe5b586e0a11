"""Several engines behind a router, on one queue of events: replicas that start, scale, fail and share a load, and
engines for prompts apart from those for answers, with the transfer of keys and values between them.

Each replica is a whole engine with its own clock. The one whose clock is least runs next, up to the next event, so
that a router always sees the state of its replicas at that time.
"""

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from localllm.errors import UsageError
from localllm.formatting import parse_duration
from localllm.plan.parallel import Link
from localllm.request import NO_NAMES, PrefixNames
from localllm.routing import REPORT_S, Router
from localllm.runtime.kv_cache.prefix_journal import PrefixJournal
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks, SequenceState
from localllm.simulate.engine import Clock, SimulatedEngine
from localllm.simulate.load import Load, Turn
from localllm.simulate.policies import BatchScheduler
from localllm.simulate.sequence import SimulatedSequence, TokenSpans

PREFIX_PIECE = 128  # tokens by which a prefix router identifies the beginnings of prompts
SCALE_INTERVAL_S = 15.0
SCALE_DOWN_S = 120.0  # for which fewer replicas must suffice before one is stopped


@dataclass(frozen=True)
class FleetSetup:
    """The engines that share a load."""

    replicas: int = 1  # at the start, and without autoscaling always
    most_replicas: int = 1  # to which autoscaling goes
    route: str = "load"
    fronts: int = 1  # that take requests in turn, each with a router of its own
    report_s: float = REPORT_S  # seconds between reports of what prefix caches hold; 0: none
    scale_target: float = 0.0  # requests per replica that autoscaling aims at
    start_s: float = 0.0  # from the decision to start a replica until it takes requests
    kills: tuple[tuple[int, float], ...] = ()  # numbers of replicas, from 1, and the times at which they fail
    prefill: int = 0  # of the replicas, those that compute prompts; 0: all compute prompts and answers
    link: Link | None = None  # over which keys and values are transferred
    token_bytes: float = 0.0  # of keys and values

    @property
    def scales(self) -> bool:
        return self.most_replicas > self.replicas

    @property
    def is_single(self) -> bool:
        return self.replicas == self.most_replicas == 1 and not self.kills

    @property
    def reports(self) -> bool:
        """Whether replicas report to the routers what their prefix caches hold."""
        return self.route == "prefix" and self.report_s > 0 and not self.prefill


class Replica:
    """An engine of a fleet."""

    def __init__(self, number: int, engine: SimulatedEngine, clock: Clock, ready_at: float):
        self.number, self.engine, self.clock, self.ready_at = number, engine, clock, ready_at
        clock.now = ready_at
        self.draining = False
        self.up_s = 0.0  # of earlier lives
        self.started_at: float | None = None  # when it began to cost something
        self.requests = 0  # that were sent to it
        self.link_free_at = 0.0  # when the transfers from it have ended
        self.reported = 0  # cursor of its journal, which all routers have learned up to

    @property
    def unfinished(self) -> int:
        scheduler = self.engine.scheduler
        return scheduler.running_count + len(scheduler.waiting)

    def takes_requests(self, now: float) -> bool:
        return self.started_at is not None and not self.draining and self.ready_at <= now

    def stop(self, now: float) -> None:
        """Count the time for which it was up."""
        if self.started_at is not None:
            self.up_s += max(0.0, now - self.started_at)
            self.started_at = None


def choose(router: Router[int], names: Sequence[Hashable], replicas: list[Replica]) -> Replica:
    """Choose a replica for a request, and record that it is sent there. names: of the beginnings of its prompt"""
    number = router.rank(names, {replica.number: replica.unfinished for replica in replicas})[0]
    router.sent(names, number)
    return next(replica for replica in replicas if replica.number == number)


def prefix_names(turn: Turn) -> list[tuple[int, ...]]:
    """Return what identifies the beginnings of a prompt, in pieces of PREFIX_PIECE tokens."""
    spans, names, parent = TokenSpans(turn.prompt), list[tuple[int, ...]](), 0
    for start in range(0, spans.length - PREFIX_PIECE + 1, PREFIX_PIECE):
        name = (parent, *spans[start : start + PREFIX_PIECE])
        parent = hash(name)
        names.append(name)
    return names


@dataclass
class Request:
    """A request on its way through a fleet."""

    turn: Turn
    number: int
    prefilled: SimulatedSequence | None = None  # with its prompt and first token computed elsewhere
    prefix_names: PrefixNames = NO_NAMES


class Fleet:
    def __init__(
        self,
        setup: FleetSetup,
        load: Load,
        make_engine: Callable[[int, Clock, Callable[[SimulatedSequence], object]], SimulatedEngine],
        make_sequence: Callable[[Request, Clock], SimulatedSequence | None],
        record: Callable[[SimulatedSequence, SimulatedSequence | None], object],
        observe: Callable[[float, "Fleet"], object],
        entry_s: float = 0.0,
    ):
        """make_engine: of a number, a clock and the callback for sequences that end; make_sequence: of a request,
        None if it is too long; record: called with an answered sequence, and the one that computed its prompt if
        that was another; observe: called before each run of a replica; entry_s: from the arrival of a request
        until it is routed."""
        self.setup, self.load, self.record, self.observe = setup, load, record, observe
        self.make_engine, self.make_sequence, self.entry_s = make_engine, make_sequence, entry_s
        self.replicas: list[Replica] = []
        self.engines: list[SimulatedEngine] = []  # of all replicas, and of those that have failed
        self.routers = [Router[int](setup.route) for _ in range(setup.fronts)]
        self.decode_router = Router[int]("load")
        self.events: list[tuple[float, int, Callable[[float], object]]] = []
        self.event_count = self.request_count = self.refused = self.failed = self.retried = 0
        self.transfers, self.transferred_bytes, self.transfer_s = 0, 0.0, 0.0
        self.requests: dict[int, Request] = {}  # that are not answered, by number
        self.held: list[Request] = []  # while no replica takes requests
        self.fewer_since = math.inf  # since when fewer replicas suffice
        self.now = 0.0
        self.is_closed = setup.prefill > 0 or load.depends_on_answers
        for _ in range(setup.replicas):
            self.add_replica(0.0, 0.0).started_at = load.next_at()  # costs count from the first arrival
        for number, at in setup.kills:
            self.at(at, lambda now, number=number: self.kill(number, now))
        if setup.scales:
            self.at(SCALE_INTERVAL_S, self.scale)
        if setup.reports and not setup.is_single:
            self.at(setup.report_s, self.report)

    # Events

    def at(self, time: float, action: Callable[[float], object]) -> None:
        self.event_count += 1
        heapq.heappush(self.events, (time, self.event_count, action))

    def run(self) -> None:
        """Run until every request is answered."""
        load, events, replicas, is_closed = self.load, self.events, self.replicas, self.is_closed
        while True:
            next_arrival = load.next_at() + self.entry_s
            next_at = min(next_arrival, events[0][0]) if events else next_arrival
            replica, others_at = None, math.inf
            for each in replicas:
                if each.engine.has_unfinished_requests:
                    if replica is None or each.clock.now < replica.clock.now:
                        others_at = replica.clock.now if replica else math.inf
                        replica = each
                    elif each.clock.now < others_at:
                        others_at = each.clock.now
            if replica and replica.clock.now < next_at:
                self.run_replica(replica, min(next_at, others_at) if is_closed else next_at, next_at)
            elif next_at == math.inf or (
                replica is None and next_arrival == math.inf and not self.requests and not self.held
            ):
                break
            elif next_arrival <= next_at:
                self.now = max(self.now, next_at)
                self.request_count += 1
                self.route(Request(load.pop(), self.request_count), next_at)
            else:
                _, _, action = heapq.heappop(events)
                self.now = max(self.now, next_at)
                action(next_at)

    def run_replica(self, replica: Replica, until: float, next_at: float) -> None:
        engine, clock, scheduler = replica.engine, replica.clock, replica.engine.scheduler
        self.observe(clock.now, self)
        if engine.advance(until):
            return
        batches = scheduler if isinstance(scheduler, BatchScheduler) else None
        if batches:
            batches.closed = next_at == math.inf
        before, launched = clock.now, engine.steps
        engine.step()
        if engine.steps == launched and not engine.in_flight and clock.now == before:
            # Nothing can run: a batch waits to be filled, a prompt for the disk, or one that is due does not fit.
            wake_at = batches.wake_at() if batches and not batches.closed else math.inf
            wake_at = min(wake_at if wake_at > before else math.inf, engine.next_load_at)
            if (later := min(next_at, wake_at if wake_at > before else math.inf)) == math.inf:
                raise UsageError("the waiting requests do not fit into the cache", "use a larger --cache-tokens")
            clock.now = max(clock.now, later)

    # Requests

    def route(self, request: Request, now: float) -> None:
        """Send a request with its prompt to a replica, or hold it until one takes requests."""
        if replicas := self.available(now, decode=False):
            router = self.routers[request.number % len(self.routers)]
            if router.route == "prefix":
                request.prefix_names = PrefixNames(prefix_names(request.turn))
            self.send(request, choose(router, request.prefix_names.names, replicas), now)
        else:
            self.held.append(request)

    def available(self, now: float, *, decode: bool) -> list[Replica]:
        """Return the replicas that take requests."""
        first, prefill = self.replicas, self.setup.prefill
        if prefill:
            first = first[prefill:] if decode else first[:prefill]
        return [replica for replica in first if replica.takes_requests(now)]

    def send(self, request: Request, replica: Replica, now: float) -> None:
        engine, clock = replica.engine, replica.clock
        if not engine.has_unfinished_requests:
            clock.now = max(clock.now, now)
        if sequence := self.make_sequence(request, clock):
            self.requests[request.number] = request
            replica.requests += 1
            engine.add_sequence(sequence)
        else:
            self.refused += 1
            self.load.answered(request.turn, now)

    def finish(self, replica: Replica, sequence: SimulatedSequence) -> None:
        """Record the end of an answer, or of a prompt whose answer another replica computes."""
        request, now = self.requests[sequence.request.id], replica.clock.now
        if self.setup.prefill and request.prefilled is None and request.turn.answer_len > 1:
            request.prefilled = sequence
            self.transfer(request, replica, now)
            return
        del self.requests[request.number]
        self.record(sequence, request.prefilled)
        self.load.answered(request.turn, now)
        if replica.draining and replica.unfinished == 0:
            replica.stop(now)

    def transfer(self, request: Request, replica: Replica, now: float) -> None:
        """Send keys and values of a prompt, behind those that are being sent from this replica."""
        assert self.setup.link
        size = request.turn.prompt_len * self.setup.token_bytes
        begin = max(now, replica.link_free_at)
        arrives_at = begin + self.setup.link.seconds(size)
        replica.link_free_at = begin + size / self.setup.link.bandwidth
        self.transfers += 1
        self.transferred_bytes += size
        self.transfer_s += arrives_at - now
        self.at(arrives_at, lambda at: self.receive(request, at))

    def receive(self, request: Request, now: float) -> None:
        """Put keys and values into the prefix cache of a replica, where the request finds them."""
        if not (replicas := self.available(now, decode=True)):
            self.held.append(request)
            return
        replica = choose(self.decode_router, (), replicas)
        pool, tokens = replica.engine.pool, TokenSpans(request.turn.prompt)
        state = SequenceState(pool, tokens)  # pyright: ignore[reportArgumentType]
        try:
            state.extend(tokens.length // pool.block_size * pool.block_size - state.length)
            state.cache_full_blocks(tokens)  # pyright: ignore[reportArgumentType]
        except OutOfBlocks:
            pass  # everything is in use: the prompt is computed again
        state.free()
        self.send(request, replica, now)

    # Replicas

    def add_replica(self, now: float, start_s: float) -> Replica:
        number, clock = len(self.replicas) + 1, Clock()
        engine = self.make_engine(number, clock, lambda sequence: self.finish(replica, sequence))
        self.follow(engine)
        replica = Replica(number, engine, clock, now + start_s)
        replica.started_at = now
        self.replicas.append(replica)
        if start_s:
            self.at(now + start_s, self.route_held)
        return replica

    def follow(self, engine: SimulatedEngine) -> None:
        """Count an engine, and have it report what its prefix cache holds."""
        self.engines.append(engine)
        if self.setup.reports:
            engine.pool.journal = PrefixJournal()

    def report(self, now: float) -> None:
        """Tell all routers what has changed in the prefix caches."""
        for replica in self.replicas:
            if journal := replica.engine.pool.journal:
                replica.reported, held, evicted = journal.since(replica.reported)
                for router in self.routers:
                    router.learn(replica.number, held, evicted)
        if self.requests or self.held or self.load.next_at() < math.inf:
            self.at(now + self.setup.report_s, self.report)

    def route_held(self, now: float) -> None:
        held, self.held = self.held, []
        for request in held:
            self.receive(request, now) if request.prefilled else self.route(request, now)

    def kill(self, number: int, now: float) -> None:
        """End a replica, and start it again. Requests without a token are sent to another one; others fail."""
        if number > len(self.replicas):
            return
        old = self.replicas[number - 1]
        if old.started_at is None:
            return
        old.stop(now)
        for router in (*self.routers, self.decode_router):
            router.forget(number)
        clock = Clock()
        engine = self.make_engine(number, clock, lambda sequence: self.finish(new, sequence))
        self.follow(engine)
        new = Replica(number, engine, clock, now + self.setup.start_s)
        new.up_s, new.requests, new.started_at = old.up_s, old.requests, now
        self.replicas[number - 1] = new
        self.at(new.ready_at, self.route_held)
        for sequence in old.engine.abandon():
            request = self.requests.pop(sequence.request.id)
            if sequence.produced == 0 and request.prefilled is None:
                self.retried += 1
                self.route(request, now)
            else:
                self.failed += 1
                self.load.answered(request.turn, now)

    def scale(self, now: float) -> None:
        """Start replicas at once, and stop one only when fewer have sufficed for a while."""
        setup, active = self.setup, [r for r in self.replicas if r.started_at is not None and not r.draining]
        unfinished = len(self.held) + sum(replica.unfinished for replica in active)
        wanted = math.ceil(unfinished / setup.scale_target)
        wanted = max(setup.replicas, min(setup.most_replicas, wanted))
        for _ in range(wanted - len(active)):
            self.start_or_resume(now)
        self.fewer_since = min(self.fewer_since, now) if wanted < len(active) else math.inf
        if now - self.fewer_since >= SCALE_DOWN_S:
            self.fewer_since = math.inf
            last = active[-1]
            last.draining = True
            if last.unfinished == 0:
                last.stop(max(now, last.clock.now))
        if self.requests or self.held or self.load.next_at() < math.inf:
            self.at(now + SCALE_INTERVAL_S, self.scale)

    def start_or_resume(self, now: float) -> None:
        """Let a replica that is draining take requests again, or start one."""
        for replica in self.replicas:
            if replica.draining:
                replica.draining = False
                if replica.started_at is None:
                    replica.started_at, replica.ready_at = now, now + self.setup.start_s
                    self.at(replica.ready_at, self.route_held)
                return
        self.add_replica(now, self.setup.start_s)

    def end(self) -> float:
        """Stop all replicas, and return when the last step ended."""
        ended = max(replica.clock.now for replica in self.replicas if replica.requests)
        for replica in self.replicas:
            replica.stop(ended)
        return ended


def parse_kills(text: str, replicas: int) -> tuple[tuple[int, float], ...]:
    """Parse `1@60s,2@5m`: numbers of replicas and when they fail. Raises UsageError."""
    kills: list[tuple[int, float]] = []
    for part in text.split(","):
        number, _, time = part.partition("@")
        if not (number.isdecimal() and time and 1 <= int(number) <= replicas):
            raise UsageError(
                f"--kill is {text!r}", f"give a replica from 1 to {replicas} and a time, such as 1@60s"
            )
        kills.append((int(number), parse_duration(time)))
    return tuple(kills)

"""Generates load on a server: in a closed loop, where each user waits for an answer before sending the next
request, or in an open loop, where requests arrive as a Poisson process without waiting.

Outcomes are recorded as they arrive, so that an interrupted run keeps its results.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from localllm.benchmark.load.client import Clock, LoadRequest
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.errors import UsageError

SendRequest = Callable[
    [LoadRequest, float], Awaitable[RequestOutcome]
]  # takes a request, and when it was scheduled


@dataclass(frozen=True)
class Load:
    """The requests of one round. Raises UsageError if it would not end or not begin."""

    requests: int | None = None
    duration_s: float | None = None  # of arrivals; requests that arrived are still answered
    concurrency: int = 1  # users of a closed loop
    rate: float | None = None  # requests per second of an open loop

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise UsageError("the load has no end", "use --requests or --duration")
        for name in ("requests", "duration_s", "concurrency", "rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the load's {name.removesuffix('_s')} is {value}", "use a number above 0")


@dataclass
class LoadRound:
    """One load on one server, beginning at `start`."""

    start: float
    outcomes: list[RequestOutcome] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)  # number of other requests, when each request was sent
    unanswered: int = 0  # in flight now, or when the run was interrupted

    @property
    def wall_s(self) -> float:
        """Time until the last successful answer ended; waiting only for failed requests does not count."""
        ends = [outcome.ended_at for outcome in self.outcomes if outcome.ok]
        return max(ends, default=self.start) - self.start


def poisson_arrivals(seed: int, rate: float) -> Iterator[float]:
    """Yield arrival times in seconds from the start, endlessly: gaps are exponential with the mean 1 / rate, and
    reproducible by seed.
    """
    draw = random.Random(seed)
    return itertools.accumulate(draw.expovariate(rate) for _ in itertools.repeat(None))


async def generate_load(
    load_round: LoadRound, load: Load, requests: Iterable[LoadRequest], send: SendRequest, seed: int, clock: Clock
) -> None:
    """Run `load` on a server and record the outcomes in `load_round`. seed: for the arrivals."""

    async def run_request(ask: LoadRequest, arrival: float) -> None:
        load_round.in_flight.append(load_round.unanswered)
        load_round.unanswered += 1
        outcome = await send(ask, arrival)
        load_round.unanswered -= 1
        load_round.outcomes.append(outcome)

    work = iter(itertools.islice(requests, load.requests))
    end = load_round.start + (load.duration_s or float("inf"))
    async with asyncio.TaskGroup() as tasks:
        if load.rate is None:

            async def user() -> None:
                while clock() < end and (ask := next(work, None)):
                    await run_request(ask, clock())

            for _ in range(load.concurrency):
                tasks.create_task(user())
            return
        for delay, ask in zip(poisson_arrivals(seed, load.rate), work, strict=False):
            arrival = load_round.start + delay
            if arrival >= end:
                return
            await asyncio.sleep(max(0.0, arrival - clock()))
            tasks.create_task(run_request(ask, arrival))

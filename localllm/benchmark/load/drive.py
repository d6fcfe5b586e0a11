"""Puts a load on a server: in a closed loop, where so many users each wait for their answer before they ask again,
or in an open one, where requests arrive as a Poisson process and wait for nobody.

Outcomes are noted as they come, so that a run which is broken off keeps what it has.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from localllm.benchmark.load.client import Clock
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.benchmark.load.wire import LoadRequest
from localllm.errors import UsageError

SendRequest = Callable[
    [LoadRequest, float], Awaitable[RequestOutcome]
]  # what is asked, and when it was to be sent


@dataclass(frozen=True)
class Load:
    """What comes at a server in one round. Raises UsageError where it would not end or not begin."""

    requests: int | None = None
    duration_s: float | None = None  # of arrivals; what has arrived is answered
    concurrency: int = 1  # of a closed loop
    rate: float | None = None  # requests a second of an open one

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise UsageError("the load has no end", "give --requests or --duration")
        for name in ("requests", "duration_s", "concurrency", "rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the load's {name.removesuffix('_s')} is {value}", "give a number above 0")


@dataclass
class LoadRound:
    """One load on one server, from `start` on."""

    start: float
    outcomes: list[RequestOutcome] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)  # how many others were, when each request was sent
    unanswered: int = 0  # in flight now, and for ever where the run was broken off

    @property
    def wall_s(self) -> float:
        """Until the last answer ended. Time in which only requests that failed were waited for is not in it."""
        ends = [outcome.ended_at for outcome in self.outcomes if outcome.ok]
        return max(ends, default=self.start) - self.start


def poisson_arrivals(seed: int, rate: float) -> Iterator[float]:
    """Seconds from the start at which requests come, endless: gaps are exponential with the mean 1 / rate, the
    same for the same seed."""
    draw = random.Random(seed)
    return itertools.accumulate(draw.expovariate(rate) for _ in itertools.repeat(None))


async def generate_load(
    load_round: LoadRound, load: Load, requests: Iterable[LoadRequest], send: SendRequest, seed: int, clock: Clock
) -> None:
    """Put `load` on a server and note what comes of it in `load_round`. seed: of the arrivals."""

    async def one(ask: LoadRequest, arrival: float) -> None:
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
                    await one(ask, clock())

            for _ in range(load.concurrency):
                tasks.create_task(user())
            return
        for after, ask in zip(poisson_arrivals(seed, load.rate), work, strict=False):
            arrival = load_round.start + after
            if arrival >= end:
                return
            await asyncio.sleep(max(0.0, arrival - clock()))
            tasks.create_task(one(ask, arrival))

"""A load on one server after the other, round by round: the same requests and arrivals for each, other prompts in
each round, and the order turned every time, so that what the machine does meanwhile hits all."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from localllm.benchmark.load.client import Client, Clock
from localllm.benchmark.load.drive import Load, Round, drive
from localllm.benchmark.load.measured import Measured
from localllm.benchmark.load.outcome import Outcome
from localllm.benchmark.load.prompts import prompts
from localllm.benchmark.load.slo import Objective
from localllm.benchmark.load.wire import WIRES, Ask, Wire
from localllm.benchmark.machine import Listener, Machine, Noise, this_machine
from localllm.errors import UsageError

MOST_ROUNDS = 10_000
LEAST_PROBE = 16  # words of the prompt that shows how many tokens a word makes
Say = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """What is put on every server. Raises UsageError where a number makes no sense."""

    load: Load
    prompt: int = 128  # tokens, as the first server that tells counts them
    output: int = 32  # tokens at most
    shared_prefix: int = 0  # tokens that all prompts begin with
    rounds: int = 3
    seed: int = 0
    text: Sequence[str] | None = None  # words to take prompts from
    ignore_eos: bool = False
    timeout_s: float = 120.0  # of a request
    objective: Objective | None = None

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("output", 1), ("rounds", 1), ("shared_prefix", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name.replace('_', ' ')} is {getattr(self, name)}", f"give {least} or more")
        if self.shared_prefix > self.prompt:
            raise UsageError("the shared prefix is longer than the prompt", "give a longer --prompt")
        if self.rounds > MOST_ROUNDS:
            raise UsageError(f"rounds is {self.rounds}", f"give {MOST_ROUNDS} at most")
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"the time-out is {self.timeout_s} s", "give more than 0")

    def asks(self, round: int, tokens_per_word: float) -> Iterator[Ask]:
        """Those of a round, endless."""
        shared = math.ceil(self.shared_prefix / tokens_per_word)
        own = math.ceil((self.prompt - self.shared_prefix) / tokens_per_word)
        beginning = self.beginning(shared)
        for prompt in prompts(self.seed_of(round), own, self.text):
            yield Ask(beginning + prompt, self.output, self.ignore_eos)

    def beginning(self, words: int) -> str:
        """What all prompts of all rounds share."""
        return next(prompts(self.seed, words, self.text)) + " " if words else ""

    def seed_of(self, round: int) -> int:
        """Of its prompts and arrivals."""
        return (self.seed + 1) * MOST_ROUNDS + round


@dataclass
class Target:
    """One server and what was measured of it."""

    client: Client
    api: str
    model: str
    prompt_tokens: int | None  # of the probe
    rounds: list[Round] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def wire(self) -> Wire:
        return WIRES[self.api]


@dataclass
class Result:
    plan: Plan
    machine: Machine
    date: str
    targets: list[Target] = field(default_factory=list)
    tokens_per_word: float | None = None  # None: nobody told
    noise: Noise | None = None
    complete: bool = False

    def measured(self, target: Target) -> Measured:
        return Measured(target.rounds, self.plan.objective)


async def run(
    result: Result,
    urls: Sequence[str],
    api: str | None,
    model: str | None,
    say: Say,
    clock: Clock = time.perf_counter,
) -> None:
    """Fills `result`, so that whoever breaks off has what was measured. Raises NetworkError where a server does
    not answer at all, UsageError where one has no way to be asked what the plan asks."""
    plan = result.plan
    async with AsyncExitStack() as open_clients:
        for url in urls:
            client = await open_clients.enter_async_context(Client(url, plan.timeout_s, clock))
            result.targets.append(await meet(client, api, model, plan))
        told = next((t.prompt_tokens for t in result.targets if t.prompt_tokens), None)
        result.tokens_per_word = told and told / probe_words(plan)
        listener = Listener()
        for number in range(plan.rounds):
            turn = number % len(result.targets)
            for target in (*result.targets[turn:], *result.targets[:turn]):
                say(f"round {number + 1} of {plan.rounds}: {target.url}")
                await one_round(target, plan, number, result.tokens_per_word or 1.0, clock)
        result.noise = listener.stop()
        result.complete = True


async def meet(client: Client, api: str | None, model: str | None, plan: Plan) -> Target:
    """Finds out what a server is, and warms it up with a prompt whose tokens it counts."""
    api = api or await client.api()
    wire = WIRES[api]
    if plan.ignore_eos and not wire.events:
        raise UsageError("Ollama's API has no way to go on past end tokens", "leave out --ignore-eos")
    model = model or await client.model(wire)
    probe = next(prompts(plan.seed, probe_words(plan), plan.text))
    tokens = await client.prompt_tokens(wire, model, probe)
    return Target(client, api, model, tokens)


def probe_words(plan: Plan) -> int:
    """Few enough for the tokens of rare words, several each, to fit where the prompts do."""
    return max(LEAST_PROBE, plan.prompt // 4)


async def one_round(target: Target, plan: Plan, number: int, tokens_per_word: float, clock: Clock) -> None:
    begun = Round(clock())
    target.rounds.append(begun)

    def send(ask: Ask, arrival: float) -> Awaitable[Outcome]:
        return target.client.ask(target.wire, target.model, ask, arrival)

    asks = plan.asks(number, tokens_per_word)
    await drive(begun, plan.load, asks, send, plan.seed_of(number), clock)


def measure(plan: Plan, urls: Sequence[str], api: str | None, model: str | None, say: Say) -> Result:
    """Puts the load on every server. A KeyboardInterrupt gives what was measured so far, not `complete`."""
    result = Result(plan, this_machine(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        asyncio.run(run(result, urls, api, model, say))
    except KeyboardInterrupt:
        if not any(round.outcomes for target in result.targets for round in target.rounds):
            raise
    return result

"""Measures several servers, round by round: with the same requests and arrivals for each, new prompts in each
round, and a rotating order, so that changes on the machine affect all servers.
"""

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property

from localllm.benchmark.load.client import SERVER_APIS, Clock, LoadClient, LoadRequest, ServerApi
from localllm.benchmark.load.drive import Load, LoadRound, generate_load
from localllm.benchmark.load.outcome import LatencyObjective, RequestOutcome
from localllm.benchmark.machine import Machine, Noise, NoiseMeter, describe_machine
from localllm.benchmark.summary import Distribution
from localllm.errors import UsageError

LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "tokens_per_s", "late_s")
MAX_ROUNDS = 10_000
MIN_PROBE_WORDS = 16  # length of the prompt that measures the tokens per word
ReportProgress = Callable[[str], object]


@dataclass(frozen=True)
class LoadPlan:
    """The load for every server. Raises UsageError for invalid numbers."""

    load: Load
    prompt: int = 128  # tokens, as counted by the first server that reports them
    output: int = 32  # maximum answer length in tokens
    shared_prefix: int = 0  # tokens at the beginning of all prompts
    rounds: int = 3
    seed: int = 0
    text: Sequence[str] | None = None  # source of prompts
    ignore_eos: bool = False
    timeout_s: float = 120.0  # per request
    objective: LatencyObjective | None = None

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("output", 1), ("rounds", 1), ("shared_prefix", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name.replace('_', ' ')} is {getattr(self, name)}", f"use {least} or more")
        if self.shared_prefix > self.prompt:
            raise UsageError("the shared prefix is longer than the prompt", "use a longer --prompt")
        if self.rounds > MAX_ROUNDS:
            raise UsageError(f"rounds is {self.rounds}", f"use at most {MAX_ROUNDS}")
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"the time-out is {self.timeout_s} s", "use more than 0")

    def make_requests(self, round: int, tokens_per_word: float) -> Iterator[LoadRequest]:
        """Yield the requests of a round endlessly."""
        shared = math.ceil(self.shared_prefix / tokens_per_word)
        own = math.ceil((self.prompt - self.shared_prefix) / tokens_per_word)
        beginning = self.shared_beginning(shared)
        for prompt in generate_prompts(self.round_seed(round), own, self.text):
            yield LoadRequest(beginning + prompt, self.output, self.ignore_eos)

    def shared_beginning(self, words: int) -> str:
        """Return the beginning shared by all prompts of all rounds."""
        return next(generate_prompts(self.seed, words, self.text)) + " " if words else ""

    def round_seed(self, round: int) -> int:
        """Return the seed of a round's prompts and arrivals."""
        return (self.seed + 1) * MAX_ROUNDS + round


@dataclass
class LoadTarget:
    """One server and its measurements."""

    client: LoadClient
    api: str
    model: str
    prompt_tokens: int | None  # of the probe
    rounds: list[LoadRound] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def server_api(self) -> ServerApi:
        return SERVER_APIS[self.api]


@dataclass(frozen=True)
class LoadMeasures:
    """Measures over all rounds on one server. Latencies are of successful answers; NaN if nothing was measured."""

    rounds: Sequence[LoadRound]
    objective: LatencyObjective | None = None

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [outcome for round in self.rounds for outcome in round.outcomes]

    @cached_property
    def answered(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.ok]

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)

    @property
    def unanswered(self) -> int:
        return sum(round.unanswered for round in self.rounds)

    @property
    def wall_s(self) -> float:
        return sum(round.wall_s for round in self.rounds)

    @property
    def requests_per_s(self) -> float:
        return self.per_s(len(self.answered))

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all answers; None if the server did not report all of them."""
        counts = [outcome.output_tokens for outcome in self.answered if outcome.output_tokens is not None]
        return sum(counts) if counts and len(counts) == len(self.answered) else None

    @property
    def output_tokens_per_s(self) -> float:
        return self.per_s(math.nan if self.output_tokens is None else self.output_tokens)

    @property
    def met_objectives(self) -> int | None:
        """Number of requests that met every objective; None without objectives."""
        return None if self.objective is None else sum(map(self.objective.is_met, self.outcomes))

    @property
    def goodput(self) -> float:
        """Requests per second that met every objective."""
        return self.per_s(math.nan if self.met_objectives is None else self.met_objectives)

    @property
    def uncounted_answers(self) -> int:
        """Number of answers whose tokens the server did not report."""
        return sum(outcome.output_tokens is None for outcome in self.answered)

    @property
    def counted_by_limit(self) -> int:
        return sum(outcome.counted_by == "limit" for outcome in self.answered)

    @property
    def pieces(self) -> int:
        return sum(len(outcome.piece_times) for outcome in self.answered)

    @property
    def prompt_tokens(self) -> Distribution:
        """The server's counts, as far as it reported them."""
        return Distribution.of(o.prompt_tokens for o in self.answered if o.prompt_tokens is not None)

    @property
    def max_in_flight(self) -> int:
        return max((count + 1 for round in self.rounds for count in round.in_flight), default=0)

    @property
    def queue_grows(self) -> bool:
        return any(queue_grows(round.in_flight) for round in self.rounds)

    def latency(self, name: str) -> Distribution:
        """Return one of `LATENCIES`, in seconds or tokens per second; `itl_s` covers all gaps of all answers."""
        values = (getattr(outcome, name) for outcome in self.answered)
        return Distribution.of(itertools.chain.from_iterable(values) if name == "itl_s" else values)

    def per_s(self, count: float) -> float:
        return count / self.wall_s if self.wall_s > 0 else math.nan


@dataclass
class LoadResult:
    plan: LoadPlan
    machine: Machine
    date: str
    targets: list[LoadTarget] = field(default_factory=list)
    tokens_per_word: float | None = None  # None if no server reported it
    noise: Noise | None = None
    complete: bool = False

    def measures(self, target: LoadTarget) -> LoadMeasures:
        return LoadMeasures(target.rounds, self.plan.objective)


async def run_load(
    result: LoadResult,
    urls: Sequence[str],
    api: str | None,
    model: str | None,
    report_progress: ReportProgress,
    clock: Clock = time.perf_counter,
) -> None:
    """Fills `result` continuously, so that an interrupted run keeps its measurements. Raises NetworkError if a
    server does not answer at all, UsageError if one does not support the plan's requests.
    """
    plan = result.plan
    async with AsyncExitStack() as open_clients:
        for url in urls:
            client = await open_clients.enter_async_context(LoadClient(url, plan.timeout_s, clock))
            result.targets.append(await connect_target(client, api, model, plan))
        reported_tokens = next((t.prompt_tokens for t in result.targets if t.prompt_tokens), None)
        result.tokens_per_word = reported_tokens and reported_tokens / probe_words(plan)
        noise_meter = NoiseMeter()
        for number in range(plan.rounds):
            offset = number % len(result.targets)
            for target in (*result.targets[offset:], *result.targets[:offset]):
                report_progress(f"round {number + 1} of {plan.rounds}: {target.url}")
                await run_round(target, plan, number, result.tokens_per_word or 1.0, clock)
        result.noise = noise_meter.stop()
        result.complete = True


async def connect_target(client: LoadClient, api: str | None, model: str | None, plan: LoadPlan) -> LoadTarget:
    """Determine a server's API and model, and warm it up with a prompt whose tokens it counts."""
    api = api or await client.detect_api()
    wire = SERVER_APIS[api]
    if plan.ignore_eos and not wire.uses_sse:
        raise UsageError("Ollama's API cannot continue past end tokens", "leave out --ignore-eos")
    model = model or await client.first_model(wire)
    probe = next(generate_prompts(plan.seed, probe_words(plan), plan.text))
    tokens = await client.count_prompt_tokens(wire, model, probe)
    return LoadTarget(client, api, model, tokens)


def probe_words(plan: LoadPlan) -> int:
    """Return a length small enough that a prompt of rare words, with several tokens each, still fits."""
    return max(MIN_PROBE_WORDS, plan.prompt // 4)


async def run_round(target: LoadTarget, plan: LoadPlan, number: int, tokens_per_word: float, clock: Clock) -> None:
    load_round = LoadRound(clock())
    target.rounds.append(load_round)

    def send(request: LoadRequest, arrival: float) -> Awaitable[RequestOutcome]:
        return target.client.send(target.server_api, target.model, request, arrival)

    requests = plan.make_requests(number, tokens_per_word)
    await generate_load(load_round, plan.load, requests, send, plan.round_seed(number), clock)


def measure_servers(
    plan: LoadPlan, urls: Sequence[str], api: str | None, model: str | None, report_progress: ReportProgress
) -> LoadResult:
    """Run the load on every server. A KeyboardInterrupt returns the measurements so far, without `complete`."""
    result = LoadResult(plan, describe_machine(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        asyncio.run(run_load(result, urls, api, model, report_progress))
    except KeyboardInterrupt:
        if not any(round.outcomes for target in result.targets for round in target.rounds):
            raise
    return result


COMMON = (
    "a able about after again all also and any back ball be because bed bird big blue boat book boy bread bring "
    "cat come day do dog door down each eat eye fall family far fast feel find fish five flower fly food friend "
    "from full game garden get girl give go good green hand happy have he help her here hill him home house how "
    "in it jump know lake land last laugh leaf learn leave let light like little long look lost love make man "
    "many moon more morning mother mountain much name new night no not now of old on one open other our over "
    "paper park people place play rain read red river road run sad say school sea see she shoe sing sit sky "
    "sleep small snow song star stay stone story sun swim table take talk tell thank the then they thing think "
    "three time to today together tree two under up walk want warm water we well what when where white who wind "
    "window with word work world year yellow you"
)
WORDS: Sequence[str] = COMMON.split()
UNIQUE_PREFIX_WORDS = 4  # random words at the beginning that make each prompt unique


def generate_prompts(seed: int, words: int, text: Sequence[str] | None = None) -> Iterator[str]:
    """Yield prompts of this many words endlessly, in no cache and reproducible by seed; the server reports their
    tokens.

    text: words to take parts from, instead of random ones; each prompt begins with a few random words, so that
    overlapping ones differ from the beginning.
    """
    random_source = random.Random(seed)
    while True:
        chosen: list[str] = random_source.choices(WORDS, k=words)
        if text:
            start = random_source.randrange(len(text))
            piece = [text[(start + i) % len(text)] for i in range(words)]
            chosen[UNIQUE_PREFIX_WORDS:] = piece[UNIQUE_PREFIX_WORDS:]
        yield " ".join(chosen)


def queue_grows(in_flight: Sequence[int]) -> bool:
    """Whether the queue keeps growing. in_flight: number of other requests at each arrival. Compares the mean of
    the last quarter with that of the second; a steady queue varies by about twice its square root.
    """
    quarter = len(in_flight) // 4
    if not quarter:
        return False
    earlier = sum(in_flight[quarter : 2 * quarter]) / quarter
    latest = sum(in_flight[-quarter:]) / quarter
    return latest > earlier + 2 * math.sqrt(max(earlier, 1.0))

"""A load on one server after the other, round by round: the same requests and arrivals for each, other prompts in
each round, and the order turned every time, so that what the machine does meanwhile hits all."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from localllm.benchmark.load.client import Clock, LoadClient
from localllm.benchmark.load.drive import Load, LoadRound, generate_load
from localllm.benchmark.load.measured import LoadMeasures
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.benchmark.load.slo import LatencyObjective
from localllm.benchmark.load.wire import SERVER_APIS, LoadRequest, ServerApi
from localllm.benchmark.machine import Machine, Noise, NoiseMeter, describe_machine
from localllm.errors import UsageError

# Prompts of a given length that no cache knows: random words, or pieces of a text from random places.
#
# Lengths are in words; how many tokens a word makes is the server's to tell.
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
UNIQUE_PREFIX_WORDS = 4  # words at the front that tell one prompt from another


def generate_prompts(seed: int, words: int, text: Sequence[str] | None = None) -> Iterator[str]:
    """Endless prompts of so many words, the same for the same seed. text: words to take pieces of, instead of
    random ones; each begins with a few random words, so that no two that overlap share their beginning."""
    draw = random.Random(seed)
    while True:
        chosen: list[str] = draw.choices(WORDS, k=words)
        if text:
            start = draw.randrange(len(text))
            piece = [text[(start + place) % len(text)] for place in range(words)]
            chosen[UNIQUE_PREFIX_WORDS:] = piece[UNIQUE_PREFIX_WORDS:]
        yield " ".join(chosen)


MAX_ROUNDS = 10_000
MIN_PROBE_WORDS = 16  # words of the prompt that shows how many tokens a word makes
ReportProgress = Callable[[str], object]


@dataclass(frozen=True)
class LoadPlan:
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
    objective: LatencyObjective | None = None

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("output", 1), ("rounds", 1), ("shared_prefix", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name.replace('_', ' ')} is {getattr(self, name)}", f"give {least} or more")
        if self.shared_prefix > self.prompt:
            raise UsageError("the shared prefix is longer than the prompt", "give a longer --prompt")
        if self.rounds > MAX_ROUNDS:
            raise UsageError(f"rounds is {self.rounds}", f"give {MAX_ROUNDS} at most")
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"the time-out is {self.timeout_s} s", "give more than 0")

    def make_requests(self, round: int, tokens_per_word: float) -> Iterator[LoadRequest]:
        """Those of a round, endless."""
        shared = math.ceil(self.shared_prefix / tokens_per_word)
        own = math.ceil((self.prompt - self.shared_prefix) / tokens_per_word)
        beginning = self.shared_beginning(shared)
        for prompt in generate_prompts(self.round_seed(round), own, self.text):
            yield LoadRequest(beginning + prompt, self.output, self.ignore_eos)

    def shared_beginning(self, words: int) -> str:
        """What all prompts of all rounds share."""
        return next(generate_prompts(self.seed, words, self.text)) + " " if words else ""

    def round_seed(self, round: int) -> int:
        """Of its prompts and arrivals."""
        return (self.seed + 1) * MAX_ROUNDS + round


@dataclass
class LoadTarget:
    """One server and what was measured of it."""

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


@dataclass
class LoadResult:
    plan: LoadPlan
    machine: Machine
    date: str
    targets: list[LoadTarget] = field(default_factory=list)
    tokens_per_word: float | None = None  # None: nobody told
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
    """Fills `result`, so that whoever breaks off has what was measured. Raises NetworkError where a server does
    not answer at all, UsageError where one has no way to be asked what the plan asks."""
    plan = result.plan
    async with AsyncExitStack() as open_clients:
        for url in urls:
            client = await open_clients.enter_async_context(LoadClient(url, plan.timeout_s, clock))
            result.targets.append(await connect_target(client, api, model, plan))
        told = next((t.prompt_tokens for t in result.targets if t.prompt_tokens), None)
        result.tokens_per_word = told and told / probe_words(plan)
        listener = NoiseMeter()
        for number in range(plan.rounds):
            turn = number % len(result.targets)
            for target in (*result.targets[turn:], *result.targets[:turn]):
                report_progress(f"round {number + 1} of {plan.rounds}: {target.url}")
                await run_round(target, plan, number, result.tokens_per_word or 1.0, clock)
        result.noise = listener.stop()
        result.complete = True


async def connect_target(client: LoadClient, api: str | None, model: str | None, plan: LoadPlan) -> LoadTarget:
    """Finds out what a server is, and warms it up with a prompt whose tokens it counts."""
    api = api or await client.detect_api()
    wire = SERVER_APIS[api]
    if plan.ignore_eos and not wire.uses_sse:
        raise UsageError("Ollama's API has no way to go on past end tokens", "leave out --ignore-eos")
    model = model or await client.first_model(wire)
    probe = next(generate_prompts(plan.seed, probe_words(plan), plan.text))
    tokens = await client.count_prompt_tokens(wire, model, probe)
    return LoadTarget(client, api, model, tokens)


def probe_words(plan: LoadPlan) -> int:
    """Few enough for the tokens of rare words, several each, to fit where the prompts do."""
    return max(MIN_PROBE_WORDS, plan.prompt // 4)


async def run_round(target: LoadTarget, plan: LoadPlan, number: int, tokens_per_word: float, clock: Clock) -> None:
    begun = LoadRound(clock())
    target.rounds.append(begun)

    def send(ask: LoadRequest, arrival: float) -> Awaitable[RequestOutcome]:
        return target.client.send(target.server_api, target.model, ask, arrival)

    asks = plan.make_requests(number, tokens_per_word)
    await generate_load(begun, plan.load, asks, send, plan.round_seed(number), clock)


def measure_servers(
    plan: LoadPlan, urls: Sequence[str], api: str | None, model: str | None, report_progress: ReportProgress
) -> LoadResult:
    """Puts the load on every server. A KeyboardInterrupt gives what was measured so far, not `complete`."""
    result = LoadResult(plan, describe_machine(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        asyncio.run(run_load(result, urls, api, model, report_progress))
    except KeyboardInterrupt:
        if not any(round.outcomes for target in result.targets for round in target.rounds):
            raise
    return result

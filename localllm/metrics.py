"""One stopwatch for every way of using a model, and the definitions of the field, each in one place.

queue       arrival until the first of the request's tokens is scheduled
load        loading the model, where this request had to wait for it; else 0
prefill     first scheduling until the first token out
TTFT        arrival until the first token out (time to first token); load is not part of it
ITL         each gap between consecutive tokens (inter-token latency)
TPOT        (E2E - TTFT) / (output tokens - 1) (time per output token)
TPS         1 / TPOT: output tokens per second once the first is out (decode speed of this one request)
prefill/s   prompt tokens that were computed, not found in the cache, per second of prefill
E2E         arrival until the last token out (end to end)
draft tokens    guesses that steps verified beside the token they were run for
acceptance rate accepted / draft tokens
tokens/step     output tokens / steps, of which each brings one token and those drafts that were right

Times are seconds of `time.perf_counter()`.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


# What the engine did for one request, step by step, for whoever wants to watch: plain data.
@dataclass(frozen=True)
class Candidate:
    """A token that could have come next."""

    token_id: int
    logprob: float  # natural logarithm, by the model's own distribution
    chance: float  # of being drawn, after penalties, temperature, top_k, top_p and min_p; 0: left out by them
    cut_by: str = ""  # what left it out first: `grammar`, `logit_bias`, `temperature`, `top_k`, `top_p`, `min_p`


@dataclass(frozen=True)
class StepReport:
    """One step, as far as it was this request's. Times are seconds since the request arrived.

    A request that waits brings no tokens: it is told of its place, when it comes and whenever that changes.
    """

    began_s: float
    ended_s: float
    tokens: int  # that the request brought to it: a piece of its prompt, or 1 and its draft tokens
    computed: int  # tokens of prompt and answer whose keys and values are in the cache after it
    blocks: int  # of the KV cache that the request holds after it
    found: int  # tokens of its prompt that were found in the cache
    running: int  # requests that the engine worked on, this among them
    waiting: int  # requests behind them
    drafts: tuple[int, ...] = ()  # token ids that it verified
    accepted: int = 0  # of these, the first so many were right
    candidates: tuple[tuple[Candidate, ...], ...] = ()  # of each token that came, itself among them
    place: int = 0  # in the queue, counted from 1; 0: it is being worked on
    prompt: int = 0  # tokens of its whole prompt


@dataclass(frozen=True)
class Slot:
    """A request that an engine has, for whoever looks at all of them. Numbers of different moments of one step."""

    id: int
    age_s: float  # since it arrived
    prompt_tokens: int
    found: int  # of them, in the cache
    computed: int  # tokens of prompt and answer whose keys and values are in the cache
    output_tokens: int
    blocks: int  # of the KV cache
    first_s: float | None  # since its first token came; None before
    waiting: bool  # it has not begun, or was put back

    @property
    def tokens_per_s(self) -> float | None:
        """Of its answer, up to now; None before there is a gap to tell by."""
        return (self.output_tokens - 1) / self.first_s if self.first_s and self.output_tokens > 1 else None


@dataclass(frozen=True)
class StepReads:
    """What a decode step of one request reads from memory, and how fast this machine reads: the roofline."""

    weights: float  # bytes a step, recurrent states among them
    per_token: float  # bytes a step for each token in the cache, of the layers that see all of them
    kept_per_token: float  # bytes that the cache keeps for each token
    bandwidth: float | None  # bytes a second, as measured; None where it was not
    windows: tuple[tuple[int, float], ...] = ()  # layers that see no more tokens, and bytes a step for each

    def bytes_per_step(self, context: float) -> float:
        """Bytes that a step reads with so many tokens in the cache."""
        windows = sum(size * min(window, context) for window, size in self.windows)
        return self.weights + self.per_token * context + windows

    def bandwidth_fraction(self, steps_per_s: float, context: float) -> float | None:
        """Of the measured bandwidth, what so many steps a second read with so many tokens in the cache."""
        return self.bytes_per_step(context) * steps_per_s / self.bandwidth if self.bandwidth else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks (numpy's default); NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True)
class Metrics:
    """The measurements of one request, in seconds, tokens and bytes; NaN where nothing could be measured."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the KV cache
    output_tokens: int
    queue_s: float
    load_s: float
    prefill_s: float
    ttft_s: float
    itl_s: tuple[float, ...]
    e2e_s: float
    peak_bytes: int  # most memory this process has held so far
    draft_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0  # of the answer, up to the last of its thoughts

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.tpot_s if self.tpot_s > 0 else math.nan

    @property
    def prefill_tokens_per_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else math.nan

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else math.nan

    @property
    def tokens_per_step(self) -> float:
        return self.output_tokens / (self.output_tokens - self.accepted_tokens) if self.output_tokens else math.nan

    def itl_percentile(self, percent: float) -> float:
        return percentile(self.itl_s, percent)

    def as_dict(self) -> dict[str, float | int | list[float] | None]:
        """For JSON: None instead of NaN, ITL percentiles beside the single gaps."""
        values: dict[str, float | int | list[float]] = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": self.queue_s,
            "load_s": self.load_s,
            "prefill_s": self.prefill_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "tokens_per_s": self.tokens_per_s,
            "itl_p50_s": self.itl_percentile(50),
            "itl_p95_s": self.itl_percentile(95),
            "itl_p99_s": self.itl_percentile(99),
            "itl_s": list(self.itl_s),
            "e2e_s": self.e2e_s,
            "peak_bytes": self.peak_bytes,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "tokens_per_step": self.tokens_per_step,
        }
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing, and what it has done since its model was loaded. Each number was true during the
    last step; they are not of one moment."""

    running: int  # requests
    waiting: int  # requests that have not begun, or were put back
    most_waiting: int  # with so many a further one is refused
    context: int  # most tokens of a request
    blocks: int  # of the cache
    block_tokens: int  # in each
    used_blocks: int  # by running requests
    cached_blocks: int  # whose content later requests would find, used or not, also those aside in main memory
    evicted_blocks: int  # whose content gave way to others'
    steps: int
    prompt_tokens: int  # of requests that have begun
    cached_tokens: int  # of these, found in the cache
    lookups: int  # requests that have begun
    hits: int  # of these, who found anything in the cache
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int  # running requests that were put back and computed again
    cancelled: int  # requests whose reader left
    finished: Mapping[str, int]  # requests by why they ended: `stop`, `length`, `error`

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that was found in the cache; NaN before there was any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


class PhaseTimer:
    """Seconds that each part of a longer task took, in their order. Of a part inside another only the inner one
    counts; any may come again."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_begin: Callable[[str], object] = lambda name: None,
    ):
        """on_begin: told of each part that is not inside another; what it raises ends the task."""
        self.seconds: dict[str, float] = {}
        self.on_begin = on_begin
        self.clock = clock
        self.active: list[str] = []
        self.last_mark = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not self.active:
            self.on_begin(name)
        self.record_elapsed()
        self.active.append(name)
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.record_elapsed()
            self.active.pop()

    def record_elapsed(self) -> None:
        before, self.last_mark = self.last_mark, self.clock()
        if self.active:
            self.seconds[self.active[-1]] += self.last_mark - before


@dataclass
class Stopwatch:
    """Follows one request: `schedule()` when its first tokens are taken up, `token()` at each token out."""

    arrival: float
    load_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0

    def mark_scheduled(self) -> None:
        """Only the first call counts: a preempted request is not new."""
        if self.scheduled is None:
            self.scheduled = self.clock()

    def record_token(self, drafted: int = 0, *, accepted: bool = False) -> None:
        """drafted: draft tokens that were verified by its step; accepted: it was one of them."""
        self.token_times.append(self.clock())
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def mark_reasoning(self) -> None:
        """The newest token has brought a thought."""
        self.reasoning_tokens = len(self.token_times)

    def finish(self, prompt_tokens: int, cached_tokens: int, peak_bytes: int) -> Metrics:
        times = self.token_times
        scheduled = math.nan if self.scheduled is None else self.scheduled
        first = times[0] if times else math.nan
        return Metrics(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=len(times),
            queue_s=scheduled - self.arrival,
            load_s=self.load_s,
            prefill_s=first - scheduled,
            ttft_s=first - self.arrival,
            itl_s=tuple(b - a for a, b in itertools.pairwise(times)),
            e2e_s=(times[-1] if times else self.clock()) - self.arrival,
            peak_bytes=peak_bytes,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )

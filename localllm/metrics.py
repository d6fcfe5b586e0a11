"""Measures all uses of a model, and defines each measure in one place.

queue       arrival until the first of the request's tokens is scheduled
load        loading the model, if this request had to wait for it; otherwise 0
prefill     first scheduling until the first token out
TTFT        arrival until the first token out (time to first token); load is not part of it
ITL         each gap between consecutive tokens (inter-token latency)
TPOT        (E2E - TTFT) / (output tokens - 1) (time per output token)
TPS         1 / TPOT: output tokens per second once the first is out (decode speed of this one request)
prefill/s   prompt tokens that were computed, not found in the cache, per second of prefill
E2E         arrival until the last token out (end to end)
draft tokens    tokens that steps verified in addition to their regular token
acceptance rate accepted / draft tokens
tokens/step     output tokens / steps; each step produces one token and any accepted drafts

Times are seconds of `time.perf_counter()`.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Candidate:
    """A possible next token."""

    token_id: int
    logprob: float  # natural logarithm, under the model's own distribution
    # Probability of being drawn, after penalties, temperature, top_k, top_p and min_p; 0 if excluded by them.
    chance: float
    cut_by: str = (
        ""  # filter that excluded it first: `grammar`, `min_tokens`, `logit_bias`, `temperature`, `top_k`, ...
    )


@dataclass(frozen=True)
class StepReport:
    """One step's work for one request. Times are seconds since the request arrived.

    A waiting request produces no tokens: its reports give its position in the queue, initially and after each
    change.
    """

    began_s: float
    ended_s: float
    tokens: int  # tokens of the request in this step: a part of its prompt, or 1 and its draft tokens
    computed: int  # tokens of prompt and answer whose keys and values are in the cache after the step
    blocks: int  # of the KV cache that the request holds after the step
    found: int  # tokens of its prompt that were found in the cache
    running: int  # requests being processed, including this one
    waiting: int  # requests in the queue
    drafts: tuple[int, ...] = ()  # token ids verified by the step
    accepted: int = 0  # number of accepted drafts
    candidates: tuple[tuple[Candidate, ...], ...] = ()  # for each new token, including itself
    place: int = 0  # in the queue, from 1; 0 if it is being processed
    prompt: int = 0  # tokens of the whole prompt


@dataclass(frozen=True)
class Slot:
    """A request in the engine, for observers. Its numbers may be from different moments of one step."""

    id: int
    age_s: float  # since arrival
    prompt_tokens: int
    found: int  # prompt tokens found in the cache
    computed: int  # tokens of prompt and answer whose keys and values are in the cache
    output_tokens: int
    blocks: int  # of the KV cache
    first_s: float | None  # since its first token; None before it
    waiting: bool  # not started yet, or preempted

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of the answer so far; None before the second token."""
        return (self.output_tokens - 1) / self.first_s if self.first_s and self.output_tokens > 1 else None


@dataclass(frozen=True)
class StepReads:
    """The memory reads of one request's decode step, and the machine's read speed, for the roofline."""

    weights: float  # bytes per step, including recurrent states
    per_token: float  # bytes per step for each cached token, in layers with full attention
    kept_per_token: float  # bytes in the cache for each token
    bandwidth: float | None  # bytes per second, as measured; None if not measured
    # For layers limited to a window: its tokens, and bytes per step for each.
    windows: tuple[tuple[int, float], ...] = ()

    def bytes_per_step(self, context: float) -> float:
        """Return the bytes read by a step with this many tokens in the cache."""
        windows = sum(size * min(window, context) for window, size in self.windows)
        return self.weights + self.per_token * context + windows

    def bandwidth_fraction(self, steps_per_s: float, context: float) -> float | None:
        """Return the share of the measured bandwidth that this many steps per second use."""
        return self.bytes_per_step(context) * steps_per_s / self.bandwidth if self.bandwidth else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between closest ranks (numpy's default); NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True)
class Metrics:
    """The measurements of one request, in seconds, tokens and bytes; NaN if nothing was measured."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the KV cache
    output_tokens: int
    queue_s: float
    load_s: float
    prefill_s: float
    ttft_s: float
    itl_s: tuple[float, ...]
    e2e_s: float
    peak_bytes: int  # peak memory of this process so far
    draft_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0  # of the answer, up to the end of its reasoning
    disk_tokens: int = 0  # of the cached tokens, those that were loaded from the disk

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
        """Return the JSON object: None instead of NaN, and ITL percentiles in addition to the gaps."""
        values: dict[str, float | int | list[float]] = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "disk_tokens": self.disk_tokens,
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


class TierMove(NamedTuple):
    """Contents of the KV cache that moved from one tier to another since the model was loaded."""

    bytes: int = 0
    seconds: float = 0.0  # of the device, the engine's thread, or a thread that reads or writes files


@dataclass
class DiskStats:
    """Counters of the prefix cache's disk tier since the model was loaded."""

    written_files: int = 0
    written_bytes: int = 0
    written_tokens: int = 0
    write_s: float = 0.0  # in a thread, behind the computation
    read_files: int = 0
    read_bytes: int = 0
    read_s: float = 0.0  # in a thread, ahead of the computation
    loaded_tokens: int = 0  # copied from the disk into the cache
    skipped_segments: int = 0  # not written because the disk was too slow
    slower_loads: int = 0  # prefixes on the disk that were computed, because that was faster

    @property
    def moves(self) -> dict[str, TierMove]:
        return {
            "host_to_disk": TierMove(self.written_bytes, self.write_s),
            "disk_to_host": TierMove(self.read_bytes, self.read_s),
        }


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The engine's current state, and its totals since the model was loaded. An embedder has no cache or output.
    Each number was correct during the last step, but they are not from a single moment.
    """

    running: int  # requests
    waiting: int  # requests not started yet, or preempted
    most_waiting: int  # further requests are refused at this number
    context: int  # maximum tokens per request
    blocks: int = 0  # of the cache
    block_tokens: int = 0  # in each
    used_blocks: int = 0  # held by running requests
    cached_blocks: int = 0  # with content for later requests, in use or not, also those in host memory
    evicted_blocks: int = 0  # whose content was replaced
    steps: int
    prompt_tokens: int  # of requests that have started
    cached_tokens: int = 0  # of these, found in the cache
    host_tokens: int = 0  # of the cached tokens, those copied back from the host tier
    disk_tokens: int = 0  # of the cached tokens, those loaded from the disk tier
    offloaded_blocks: int = 0  # moved from the device to the host tier
    restored_blocks: int = 0  # copied back
    disk: DiskStats | None = None  # None without a disk tier
    # By `device_to_host` and so on. The disk tier's have two parts: between device and host, and host and disk.
    moves: Mapping[str, TierMove] = field(default_factory=dict[str, TierMove])
    lookups: int = 0  # requests that have started
    hits: int = 0  # of these, requests with cached tokens
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0  # running requests that were returned to the queue and recomputed
    cancelled: int = 0  # requests whose client disconnected
    # Requests by finish reason: `stop`, `length`, `error`.
    finished: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache; NaN before there were any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


class PhaseTimer:
    """Measures the seconds of each phase of a longer task, in order. Time in a nested phase counts only for that
    phase; phases may repeat.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_begin: Callable[[str], object] = lambda name: None,
    ):
        """on_begin: called for each phase that is not nested; an exception from it ends the task."""
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
        previous_mark, self.last_mark = self.last_mark, self.clock()
        if self.active:
            self.seconds[self.active[-1]] += self.last_mark - previous_mark


@dataclass
class Stopwatch:
    """Times one request: call `mark_scheduled()` when its first tokens are scheduled, `record_token()` for each
    token.
    """

    arrival: float
    load_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0

    def mark_scheduled(self, at: float | None = None) -> None:
        """Only the first call counts: a preempted request is not new. at: when, if not now"""
        if self.scheduled is None:
            self.scheduled = self.clock() if at is None else at

    def record_token(self, drafted: int = 0, *, accepted: bool = False) -> None:
        """drafted: draft tokens verified by the token's step; accepted: whether it was one of them."""
        self.token_times.append(self.clock())
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def mark_reasoning(self) -> None:
        """The latest token belonged to reasoning."""
        self.reasoning_tokens = len(self.token_times)

    def finish(self, prompt_tokens: int, cached_tokens: int, peak_bytes: int, disk_tokens: int = 0) -> Metrics:
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
            disk_tokens=disk_tokens,
        )

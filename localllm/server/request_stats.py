"""Statistics of HTTP requests, recorded by `AnswerReader` for the request log and `/metrics`, and recent latencies
by model for `localllm top`."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol

from localllm.api.body import IgnoredFields
from localllm.metrics import Metrics, percentile

CANCELLED, FAILED = "cancelled", "error"  # finish reasons of incomplete answers
WINDOW_S = 300.0  # of recent latencies
MAX_ANSWERS = 1000  # per model
MAX_GAPS = 20_000  # between tokens, per model; their percentiles take some milliseconds

SUMMARY_FIELDS = (
    "model",
    "prompts",
    "metrics_list",
    "finish_reasons",
    "prompt_tokens",
    "output_tokens",
    "error",
    "template",
    "ignored",
)

JsonObject = dict[str, Any]


class AnswerCounter(Protocol):
    """Counts the answers of all requests."""

    def answer_ended(
        self, model: str, reason: str, prompt_tokens: int, metrics: Metrics | None, output_tokens: int, key: str
    ) -> None: ...


class RequestCounter(AnswerCounter, Protocol):
    """Counts the requests and answers of a server."""

    def request_ended(self, method: str, route: str | None, status: int, seconds: float) -> None: ...


@dataclass
class RequestStats:
    """One HTTP request, with any number of answers."""

    id: str
    counter: AnswerCounter
    log_prompts: bool = False
    model: str | None = None
    key: str = ""  # label of the API key
    prompts: list[str] = field(default_factory=list)
    metrics_list: list[Metrics] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """Error message sent to the client."""

    replica: str | None = None
    """Number of the replica that answered, where there are several."""

    template: str | None = None
    """Name of the chat template used instead of one that the model lacks."""

    ignored: IgnoredFields = field(default_factory=IgnoredFields)

    def answer_ended(
        self, model: str, reason: str, prompt_tokens: int, metrics: Metrics | None = None, output_tokens: int = 0
    ) -> None:
        """Record a finished answer. output_tokens: used if there are no metrics, as the answer was cancelled."""
        self.model = model
        self.finish_reasons.append(reason)
        self.metrics_list += [metrics] if metrics else []
        self.prompt_tokens += prompt_tokens
        self.output_tokens += metrics.output_tokens if metrics else output_tokens
        self.counter.answer_ended(model, reason, prompt_tokens, metrics, output_tokens, self.key)

    def summary(self) -> JsonObject:
        """Fields of the request for a log line, for the process that writes the log."""
        return {name: getattr(self, name) for name in SUMMARY_FIELDS}

    def add_summary(self, fields: Mapping[str, Any]) -> None:
        """Merge the fields that another process has recorded for the request."""
        for name, value in fields.items():
            setattr(self, name, value)


CURRENT_REQUEST: ContextVar[RequestStats | None] = ContextVar("current_request", default=None)


def current_request_stats() -> RequestStats | None:
    """Statistics of the request that this task serves."""
    return CURRENT_REQUEST.get()


@dataclass
class LatencySamples:
    """Latencies of one model as (monotonic time, seconds), oldest first."""

    ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))
    queue: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))
    itl: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))


class RecentLatencies:
    """Latencies of the newest answers, by model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.models: dict[str, LatencySamples] = {}

    def answer_ended(self, model: str, metrics: Metrics) -> None:
        samples, now = self.models.setdefault(model, LatencySamples()), self.clock()
        for series, seconds in ((samples.ttft, metrics.ttft_s), (samples.queue, metrics.queue_s)):
            if not math.isnan(seconds):
                series.append((now, seconds))
        samples.itl.extend(zip(repeat(now), metrics.itl_s, strict=False))

    def percentiles(self, model: str) -> JsonObject:
        """p50, p95 and p99 in seconds over the last WINDOW_S; None without samples."""
        samples, since = self.models.get(model, LatencySamples()), self.clock() - WINDOW_S
        result: JsonObject = {"window_s": WINDOW_S, "answers": sum(at >= since for at, _ in samples.ttft)}
        for name, series in (("ttft", samples.ttft), ("itl", samples.itl), ("queue", samples.queue)):
            values = [seconds for at, seconds in series if at >= since]
            result[name] = {f"p{p}_s": percentile(values, p) if values else None for p in (50, 95, 99)}
        return result

"""What one HTTP request came to, for its line in the log and for the sums of `/metrics`: noted where answers are
read (`Answers`), whichever API was asked.

Knows nothing of HTTP or of formats.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from localllm.api.body import IgnoredFields
from localllm.metrics import Metrics, percentile

CANCELLED, FAILED = "cancelled", "error"  # finish reasons of answers that did not come to their end


class AnswerCounter(Protocol):
    """What adds up answers."""

    def answer_ended(
        self, model: str, why: str, prompt_tokens: int, metrics: Metrics | None, output_tokens: int
    ) -> None: ...


@dataclass
class RequestStats:
    """One request. Its answers may be several, or none."""

    id: str
    counter: AnswerCounter
    log_prompts: bool = False
    model: str | None = None
    prompts: list[str] = field(default_factory=list)
    metrics_list: list[Metrics] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """What the client was told went wrong."""

    template: str | None = None
    """The chat template that stands in for the one that the model lacks."""

    ignored: IgnoredFields = field(default_factory=IgnoredFields)

    def answer_ended(
        self, model: str, why: str, prompt_tokens: int, metrics: Metrics | None = None, output_tokens: int = 0
    ) -> None:
        """prompt_tokens: its tokens; output_tokens: of an answer without measurements, as it was left."""
        self.model = model
        self.finish_reasons.append(why)
        self.metrics_list += [metrics] if metrics else []
        self.prompt_tokens += prompt_tokens
        self.output_tokens += metrics.output_tokens if metrics else output_tokens
        self.counter.answer_ended(model, why, prompt_tokens, metrics, output_tokens)


CURRENT_REQUEST: ContextVar[RequestStats | None] = ContextVar("account", default=None)


def current_request_stats() -> RequestStats | None:
    """That of the request that is being answered."""
    return CURRENT_REQUEST.get()


# What the newest answers of each model took, for whoever looks at a server now. Knows nothing of HTTP.

WINDOW_S = 300.0
MAX_ANSWERS = 1000
MAX_GAPS = 20_000  # whose percentiles take some milliseconds

JsonObject = dict[str, Any]


@dataclass
class LatencySamples:
    """Of one model. Each deque holds (when, seconds), oldest first."""

    ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))
    queue: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))
    itl: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))


class RecentLatencies:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.models: dict[str, LatencySamples] = {}

    def answer_ended(self, model: str, metrics: Metrics) -> None:
        one, now = self.models.setdefault(model, LatencySamples()), self.clock()
        for kept, seconds in ((one.ttft, metrics.ttft_s), (one.queue, metrics.queue_s)):
            if not math.isnan(seconds):
                kept.append((now, seconds))
        one.itl.extend((now, gap) for gap in metrics.itl_s)

    def percentiles(self, model: str) -> JsonObject:
        """Percentiles of answers that ended in the last minutes, None where there were none; times in seconds."""
        one, since = self.models.get(model, LatencySamples()), self.clock() - WINDOW_S
        found: JsonObject = {"window_s": WINDOW_S, "answers": sum(at >= since for at, _ in one.ttft)}
        for name, kept in (("ttft", one.ttft), ("itl", one.itl), ("queue", one.queue)):
            values = [seconds for at, seconds in kept if at >= since]
            found[name] = {f"p{p}_s": percentile(values, p) if values else None for p in (50, 95, 99)}
        return found

"""What the newest answers of each model took, for whoever looks at a server now. Knows nothing of HTTP."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localllm.metrics import Metrics, percentile

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

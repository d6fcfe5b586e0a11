"""What became of models, and why: the newest entries, and a line of the log each."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

MAX_EVENTS = 200
log = logging.getLogger("localllm.models")

ModelEventType = Literal["loaded", "unloaded", "resized", "failed"]


@dataclass(frozen=True)
class ModelEvent:
    what: ModelEventType
    model: str
    why: str
    seconds: float | None = None  # that it took
    at: float = field(default_factory=time.time)  # seconds since 1970


class ModelEventLog:
    def __init__(self) -> None:
        self.recent: deque[ModelEvent] = deque(maxlen=MAX_EVENTS)
        self.counts: dict[ModelEventType, int] = {"loaded": 0, "unloaded": 0, "resized": 0, "failed": 0}

    def __iter__(self) -> Iterator[ModelEvent]:
        """The oldest first."""
        return iter(self.recent)

    def add(self, what: ModelEventType, model: str, why: str, seconds: float | None = None) -> None:
        self.recent.append(ModelEvent(what, model, why, seconds))
        self.counts[what] += 1
        took = {} if seconds is None else {"seconds": round(seconds, 3)}
        log.info(what, extra={"fields": {"event": what, "model": model, "why": why, **took}})

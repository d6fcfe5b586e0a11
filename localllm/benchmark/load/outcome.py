"""The outcome of one request as seen by the client, and its metrics as defined in `metrics.py`.

Times are seconds on one clock. Arrival is the scheduled time, so that a late client does not favour the server. A
piece is a message with text: a server may send several tokens in one, or none.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from localllm.errors import UsageError
from localllm.metrics import percentile

TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")


@dataclass(frozen=True)
class RequestOutcome:
    arrival: float
    sent_at: float
    piece_times: tuple[float, ...] = ()  # when each arrived
    ended_at: float = math.nan  # when the server reported the end
    prompt_tokens: int | None = None  # as reported by the server; None if not
    output_tokens: int | None = None
    counted_by: str | None = None  # "usage", or "limit": the answer stopped at the requested token limit
    error: str | None = None  # short description

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def late_s(self) -> float:
        """Seconds by which the client sent the request late."""
        return self.sent_at - self.arrival

    @property
    def ttft_s(self) -> float:
        return self.piece_times[0] - self.arrival if self.piece_times else math.nan

    @property
    def itl_s(self) -> list[float]:
        """Gaps between pieces: between tokens if a server sends each one separately."""
        return [b - a for a, b in itertools.pairwise(self.piece_times)]

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.arrival

    @property
    def tpot_s(self) -> float:
        tokens = self.output_tokens or 0
        return (self.e2e_s - self.ttft_s) / (tokens - 1) if tokens > 1 else math.nan

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.tpot_s if self.tpot_s > 0 else math.nan


OBJECTIVE_MEASURES: dict[str, Callable[[RequestOutcome], float]] = {
    "ttft": lambda outcome: outcome.ttft_s,
    "tpot": lambda outcome: outcome.tpot_s,
    "itl": lambda outcome: percentile(outcome.itl_s, 99),
    "e2e": lambda outcome: outcome.e2e_s,
}


@dataclass(frozen=True)
class LatencyObjective:
    """Service level objectives of one answer, such as `ttft=500ms,tpot=50ms`: the maximum seconds of each measure.

    For the gaps between its pieces (`itl`), the 99th percentile counts.
    """

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "LatencyObjective":
        """Parse `ttft=500ms,tpot=50ms`. Raises UsageError for an unknown measure, or a time without a unit."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, time = (word.strip() for word in part.partition("="))
            if name not in OBJECTIVE_MEASURES or name in limits:
                raise UsageError(
                    f"--slo has {part.strip()!r}", f"use each of {', '.join(OBJECTIVE_MEASURES)} at most once"
                )
            match = TIME.fullmatch(time)
            if not match or not float(match[1]):
                state = f"is {time!r}" if time else "has no time"
                raise UsageError(f"--slo {name} {state}", f"write for example {name}=500ms or {name}=2s")
            limits[name] = float(match[1]) * TIME_UNITS[match[2]]
        return cls(limits)

    def is_met(self, outcome: RequestOutcome) -> bool:
        """Failed answers meet nothing. A measure that an answer does not have (gaps of a single token) is met; one
        that is unknown because tokens were not counted is not.
        """
        return outcome.ok and all(self._kept(name, limit, outcome) for name, limit in self.limits.items())

    def _kept(self, name: str, limit: float, outcome: RequestOutcome) -> bool:
        value = OBJECTIVE_MEASURES[name](outcome)
        if not math.isnan(value):
            return value <= limit
        if name == "tpot":
            return outcome.output_tokens is not None and outcome.output_tokens < 2
        return name == "itl"

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {limit * 1e3:g} ms" for name, limit in self.limits.items())

"""Service level objectives such as `ttft=500ms,tpot=50ms`, and whether an answer meets them."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from localllm.benchmark.load.outcome import RequestOutcome
from localllm.errors import UsageError
from localllm.metrics import percentile

TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
OBJECTIVE_MEASURES: dict[str, Callable[[RequestOutcome], float]] = {
    "ttft": lambda outcome: outcome.ttft_s,
    "tpot": lambda outcome: outcome.tpot_s,
    "itl": lambda outcome: percentile(outcome.itl_s, 99),
    "e2e": lambda outcome: outcome.e2e_s,
}


@dataclass(frozen=True)
class LatencyObjective:
    """Service level objectives of one answer: the maximum seconds of each measure. For the gaps between its pieces
    (`itl`), the 99th percentile counts.
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
                raise UsageError(f"--slo {name} is {time!r}", "use a time such as 500ms or 2s")
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

"""The measures of a load on one server: from outcomes to percentiles, rates and goodput."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.benchmark.load.drive import Round
from localllm.benchmark.load.outcome import Outcome
from localllm.benchmark.load.slo import Objective
from localllm.metrics import percentile

PERCENTS = (50, 95, 99)
LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s")


@dataclass(frozen=True)
class Measured:
    """Of all rounds on one server. Latencies are of the answers that came; NaN where nothing could be measured."""

    rounds: Sequence[Round]
    objective: Objective | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for round in self.rounds for outcome in round.outcomes]

    @property
    def answers(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.ok]

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)

    @property
    def wall_s(self) -> float:
        return sum(round.wall_s for round in self.rounds)

    @property
    def requests_per_s(self) -> float:
        return self.per_s(len(self.answers))

    @property
    def output_tokens(self) -> int | None:
        """Of all answers; None where the server did not tell how many some of them have."""
        counts = [outcome.output_tokens for outcome in self.answers]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    @property
    def output_tokens_per_s(self) -> float:
        return self.per_s(math.nan if self.output_tokens is None else self.output_tokens)

    @property
    def goodput(self) -> float:
        """Requests a second that met every objective; NaN without objectives."""
        return self.per_s(sum(map(self.objective.met, self.outcomes))) if self.objective else math.nan

    @property
    def counted_by(self) -> set[str | None]:
        return {outcome.counted_by for outcome in self.answers}

    @property
    def most_in_flight(self) -> int:
        return max((count + 1 for round in self.rounds for count in round.in_flight), default=0)

    @property
    def queue_grows(self) -> bool:
        return any(grows(round.in_flight) for round in self.rounds)

    def latency(self, name: str, percent: float) -> float:
        """Of `LATENCIES`, or `tokens_per_s` or `late_s`, in seconds; of all gaps of all answers for `itl_s`."""
        values = [getattr(outcome, name) for outcome in self.answers]
        if name == "itl_s":
            values = list(itertools.chain.from_iterable(values))
        return percentile([value for value in values if not math.isnan(value)], percent)

    def mean(self, tokens: Callable[[Outcome], float | None]) -> float:
        """Of what `tokens` gives of the answers, leaving None out."""
        counts = [count for count in map(tokens, self.answers) if count is not None]
        return sum(counts) / len(counts) if counts else math.nan

    def per_s(self, count: float) -> float:
        return count / self.wall_s if self.wall_s > 0 else math.nan

    def as_dict(self) -> dict[str, object]:
        """For JSON: None instead of NaN; times in seconds."""
        values: dict[str, object] = {
            "requests": len(self.outcomes),
            "answers": len(self.answers),
            "errors": dict(self.errors),
            "unanswered": sum(round.unanswered for round in self.rounds),
            "wall_s": self.wall_s,
            "prompt_tokens_mean": self.mean(lambda outcome: outcome.prompt_tokens),
            "output_tokens": self.output_tokens,
            "output_tokens_mean": self.mean(lambda outcome: outcome.output_tokens),
            "tokens_counted_by": sorted(way or "nobody" for way in self.counted_by),
            "pieces_mean": self.mean(lambda outcome: len(outcome.pieces)),
        }
        for name in (*LATENCIES, "tokens_per_s", "late_s"):
            values[name] = {f"p{percent}": finite(self.latency(name, percent)) for percent in PERCENTS}
        values |= {
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "goodput_requests_per_s": self.goodput,
            "most_in_flight": self.most_in_flight,
            "queue_grows": self.queue_grows,
            "rounds": [
                {
                    "wall_s": round.wall_s,
                    "answers": len(one.answers),
                    "output_tokens_per_s": finite(one.output_tokens_per_s),
                }
                for round in self.rounds
                for one in [Measured([round])]
            ],
        }
        return {name: finite(value) if isinstance(value, float) else value for name, value in values.items()}


def grows(in_flight: Sequence[int]) -> bool:
    """Do more and more requests wait? in_flight: as each arrived, how many others were. The mean of the last
    quarter of arrivals is held against that of the second, whose double root is what a steady queue varies by."""
    quarter = len(in_flight) // 4
    if not quarter:
        return False
    before = sum(in_flight[quarter : 2 * quarter]) / quarter
    at_last = sum(in_flight[-quarter:]) / quarter
    return at_last > before + 2 * math.sqrt(max(before, 1.0))


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

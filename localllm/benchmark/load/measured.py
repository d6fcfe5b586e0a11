"""Computes measures of a load on one server: from outcomes to distributions, rates and goodput."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from localllm.benchmark.load.drive import LoadRound
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.benchmark.load.slo import LatencyObjective
from localllm.benchmark.summary import Distribution

LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "tokens_per_s", "late_s")


@dataclass(frozen=True)
class LoadMeasures:
    """Measures over all rounds on one server. Latencies are of successful answers; NaN if nothing was measured."""

    rounds: Sequence[LoadRound]
    objective: LatencyObjective | None = None

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [outcome for round in self.rounds for outcome in round.outcomes]

    @cached_property
    def answered(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.ok]

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)

    @property
    def unanswered(self) -> int:
        return sum(round.unanswered for round in self.rounds)

    @property
    def wall_s(self) -> float:
        return sum(round.wall_s for round in self.rounds)

    @property
    def requests_per_s(self) -> float:
        return self.per_s(len(self.answered))

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all answers; None if the server did not report all of them."""
        counts = [outcome.output_tokens for outcome in self.answered if outcome.output_tokens is not None]
        return sum(counts) if counts and len(counts) == len(self.answered) else None

    @property
    def output_tokens_per_s(self) -> float:
        return self.per_s(math.nan if self.output_tokens is None else self.output_tokens)

    @property
    def met_objectives(self) -> int | None:
        """Number of requests that met every objective; None without objectives."""
        return None if self.objective is None else sum(map(self.objective.is_met, self.outcomes))

    @property
    def goodput(self) -> float:
        """Requests per second that met every objective."""
        return self.per_s(math.nan if self.met_objectives is None else self.met_objectives)

    @property
    def uncounted_answers(self) -> int:
        """Number of answers whose tokens the server did not report."""
        return sum(outcome.output_tokens is None for outcome in self.answered)

    @property
    def counted_by_limit(self) -> int:
        return sum(outcome.counted_by == "limit" for outcome in self.answered)

    @property
    def pieces(self) -> int:
        return sum(len(outcome.piece_times) for outcome in self.answered)

    @property
    def prompt_tokens(self) -> Distribution:
        """The server's counts, as far as it reported them."""
        return Distribution.of(o.prompt_tokens for o in self.answered if o.prompt_tokens is not None)

    @property
    def max_in_flight(self) -> int:
        return max((count + 1 for round in self.rounds for count in round.in_flight), default=0)

    @property
    def queue_grows(self) -> bool:
        return any(queue_grows(round.in_flight) for round in self.rounds)

    def latency(self, name: str) -> Distribution:
        """Return one of `LATENCIES`, in seconds or tokens per second; `itl_s` covers all gaps of all answers."""
        values = (getattr(outcome, name) for outcome in self.answered)
        return Distribution.of(itertools.chain.from_iterable(values) if name == "itl_s" else values)

    def per_s(self, count: float) -> float:
        return count / self.wall_s if self.wall_s > 0 else math.nan


def queue_grows(in_flight: Sequence[int]) -> bool:
    """Whether the queue keeps growing. in_flight: number of other requests at each arrival. Compares the mean of
    the last quarter with that of the second; a steady queue varies by about twice its square root.
    """
    quarter = len(in_flight) // 4
    if not quarter:
        return False
    earlier = sum(in_flight[quarter : 2 * quarter]) / quarter
    latest = sum(in_flight[-quarter:]) / quarter
    return latest > earlier + 2 * math.sqrt(max(earlier, 1.0))

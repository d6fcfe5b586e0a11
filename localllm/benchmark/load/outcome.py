"""The outcome of one request as seen by the client, and its metrics as defined in `metrics.py`.

Times are seconds on one clock. Arrival is the scheduled time, so that a late client does not favour the server. A
piece is a message with text: a server may send several tokens in one, or none.
"""

import itertools
import math
from dataclasses import dataclass


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
        """How much later than scheduled the client sent it."""
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

"""What became of one request, as seen at the client, and what follows from it in the definitions of `metrics.py`.

Times are seconds on one clock. Arrival is when the request was to be sent, so that a client that is late cannot
flatter the server. A piece is a message that brought text: a server may send several tokens in one, or none.
"""

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestOutcome:
    arrival: float
    sent_at: float
    piece_times: tuple[float, ...] = ()  # when each came
    ended_at: float = math.nan  # when the answer was told to be complete
    prompt_tokens: int | None = None  # what the server told; None: nothing
    output_tokens: int | None = None
    counted_by: str | None = None  # "usage", or "limit": the server told that it stopped at the tokens asked for
    error: str | None = None  # its kind, in a few words

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def late_s(self) -> float:
        """How much later than planned the client sent it."""
        return self.sent_at - self.arrival

    @property
    def ttft_s(self) -> float:
        return self.piece_times[0] - self.arrival if self.piece_times else math.nan

    @property
    def itl_s(self) -> list[float]:
        """Gaps between pieces: between tokens where a server sends each alone."""
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

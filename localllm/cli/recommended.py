"""Which model is recommended for a machine: the best that fits comfortably and would be fast enough.

Best is the one of most parameters, as that says more of a model's answers than anything else that is known before
it is tried; a mixture counts as the geometric mean of all of them and those that one token meets, as is usual.
Comfortably: with a quarter of the free memory to spare, since other programs want some, and conversations grow.
Fast enough: as fast as people read, 250 words a minute, with something to spare. One whose terms have to be
accepted first, at the Hub, is not recommended before that is done.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.tui.machine import ModelOffer

MAX_MEMORY_FRACTION = 3 / 4  # of the free memory
MIN_TOKENS_PER_S = 8.0  # 250 words a minute are 5.5, at four tokens for three words
# Bytes of weights a second that a processor reads whose rate was never measured: a third of what two channels of
# DDR4-2666 give at most. A GPU reads all that it holds many times a second.
ASSUMED_READ_BYTES_PER_S = {"cpu": 14e9, "cuda": math.inf}


@dataclass(frozen=True)
class Candidate:
    """A model that answers, of which enough is known."""

    offer: ModelOffer
    parameters: float
    active_parameters: float  # of them, those that one token meets
    weight_bytes: int  # in memory
    gated: bool = False  # and not here

    @property
    def strength(self) -> float:
        return math.sqrt(self.parameters * self.active_parameters)

    def tokens_per_s(self, device_type: str) -> float:
        """device_type: of the device."""
        read = self.weight_bytes * self.active_parameters / self.parameters
        return self.offer.tokens_per_s or ASSUMED_READ_BYTES_PER_S[device_type] / read


def recommend(candidates: Sequence[Candidate], device_type: str) -> ModelOffer | None:
    """None where nothing fits that comfortably. Among equals one that is here, then the smaller download."""

    def good(candidate: Candidate) -> bool:
        offer = candidate.offer
        fits = offer.fits and (offer.needs_bytes or 0) <= MAX_MEMORY_FRACTION * (offer.free_bytes or 0)
        return bool(fits) and not candidate.gated and candidate.tokens_per_s(device_type) >= MIN_TOKENS_PER_S

    def rank(candidate: Candidate) -> tuple[float, bool, float]:
        return candidate.strength, candidate.offer.is_here, -candidate.weight_bytes

    best = max(filter(good, candidates), key=rank, default=None)
    return best.offer if best else None

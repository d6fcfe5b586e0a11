"""What a step could be at most, and what keeps it from that: the roofline (Williams, Waterman and Patterson 2009),
with rates that were measured in the same run.

Three times are set beside the one that was measured:

reading     the bytes that the step must read, at the rate of a copy
computing   its multiplications and additions, at the rate of plain products of many rows
products    what its matrix products and its attention should take, by the model's own format: weights at the rate
            that products with matrices like the model's reach with as many rows; keys and values at the rate of a
            copy, and beyond one token a stream attention at the rate of computing

The bound is the first of these that holds:

host        products are less than half of the step: the rest is what the host does between them, and small
            operations
memory      reading is at least half of the time that is left: more bandwidth would help
compute     else: arithmetic, of many rows or of unpacking weights
"""

from dataclasses import dataclass
from typing import Literal

from localllm.benchmark.ceilings import Ceilings
from localllm.benchmark.figures import StepWork

HALF = 0.5

Bound = Literal["memory", "compute", "host"]


@dataclass(frozen=True)
class Roofline:
    """Times are seconds of a step, or of all steps of a prefill."""

    seconds: float  # measured
    bytes: float  # that must be read
    flops: float
    reading_s: float
    computing_s: float
    products_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds

    @property
    def of_memory(self) -> float:
        """Fraction of the memory's roof: above 1 where reading alone is faster than a copy."""
        return self.reading_s / self.seconds

    @property
    def of_compute(self) -> float:
        return self.computing_s / self.seconds

    @property
    def of_roof(self) -> float:
        """Of the lower of the two roofs over this step."""
        return max(self.of_memory, self.of_compute)

    @property
    def host_share(self) -> float:
        """Of the time, what is not products or attention; 0 where these alone took longer than the step did."""
        return max(0.0, 1 - self.products_s / self.seconds)

    @property
    def bound(self) -> Bound:
        if self.host_share > HALF:
            return "host"
        return "memory" if self.reading_s >= HALF * min(self.products_s, self.seconds) else "compute"


def compute_roofline(work: StepWork, seconds: float, ceilings: Ceilings) -> Roofline:
    """seconds: measured for this work."""
    beside = (work.bytes - work.weight_bytes) / ceilings.copy + work.attention_flops / ceilings.flops
    return Roofline(
        seconds=seconds,
        bytes=work.bytes,
        flops=work.flops,
        reading_s=work.bytes / ceilings.copy,
        computing_s=work.flops / ceilings.flops,
        products_s=work.weight_bytes / ceilings.product_rate(work.tokens_per_step) + beside,
    )

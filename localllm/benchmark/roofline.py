"""Compares a step with its limits, and determines its bottleneck: the roofline (Williams, Waterman and Patterson
2009), with rates measured in the same run.

Three times are compared with the measured one:

reading     the bytes that the step must read, at the rate of a copy
computing   its multiplications and additions, at the rate of dense products with many rows
products    the expected time of its matrix products and attention in the model's own format: weights at the rate
            of products with similar matrices and the same number of rows; keys and values at the rate of a copy,
            and attention at the rate of computing if a stream has more than one token

The bound is the first of these that applies:

host        products take less than half of the step: the rest is host work between them, and small operations
memory      reading takes at least half of the remaining time: more bandwidth would help
compute     otherwise: arithmetic, either for many rows or for unpacking weights
"""

from dataclasses import dataclass
from typing import Literal

from localllm.benchmark.ceilings import Ceilings
from localllm.benchmark.figures import StepWork

HALF = 0.5

Bound = Literal["memory", "compute", "host"]


@dataclass(frozen=True)
class Roofline:
    """Times are in seconds, for a step or all steps of a prefill."""

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
        """Fraction of the memory limit: above 1 if reading alone is faster than a copy."""
        return self.reading_s / self.seconds

    @property
    def of_compute(self) -> float:
        return self.computing_s / self.seconds

    @property
    def of_roof(self) -> float:
        """Fraction of the lower of the two limits."""
        return max(self.of_memory, self.of_compute)

    @property
    def host_share(self) -> float:
        """Share of the time outside of products and attention; 0 if those alone take longer than the step."""
        return max(0.0, 1 - self.products_s / self.seconds)

    @property
    def bound(self) -> Bound:
        if self.host_share > HALF:
            return "host"
        return "memory" if self.reading_s >= HALF * min(self.products_s, self.seconds) else "compute"


def compute_roofline(work: StepWork, seconds: float, ceilings: Ceilings) -> Roofline:
    """seconds: measured for this work."""
    other_s = (work.bytes - work.weight_bytes) / ceilings.copy + work.attention_flops / ceilings.flops
    return Roofline(
        seconds=seconds,
        bytes=work.bytes,
        flops=work.flops,
        reading_s=work.bytes / ceilings.copy,
        computing_s=work.flops / ceilings.flops,
        products_s=work.weight_bytes / ceilings.product_rate(work.tokens_per_step) + other_s,
    )

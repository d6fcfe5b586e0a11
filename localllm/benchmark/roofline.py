"""The roofline (Williams, Waterman and Patterson 2009): measures the limits of a device, compares a step with
them, and determines its bottleneck.

The ceilings are rates of copies, of products of dense matrices, and of products with matrices in the model's
format. They are measured while the model is loaded, with the same number of threads, so that both run under the
same conditions.

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

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from localllm.benchmark.figures import StepWork
from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.matrices import PackedMatrix
from localllm.hardware import measure
from localllm.hardware.device import device_context
from localllm.plan import measured
from localllm.quant.packing import INT4
from localllm.runtime import kernels

MAX_MATRICES = 64
MAX_DECODE_ROWS = 32  # of x, for which every product reads other weights; with more, arithmetic takes longer
PACKED_SHAPE, PACKED_GROUP = (4096, 4096), 32  # a matrix of an 8B model
HALF = 0.5

Bound = Literal["memory", "compute", "host"]


@dataclass(frozen=True)
class Ceilings:
    """Maximum rates of a device. A copy counts bytes read and bytes written."""

    copy: float
    """Bytes/s, for as many bytes as a step reads, at most `rates.BUFFER_BYTES`: data that fits into caches is
    compared with copies in caches"""

    flops: float
    """Operations/s of products of dense matrices in the model's dtype"""

    products: dict[int, float]
    """Bytes of weights per second in products with matrices like the model's, by rows of the other factor"""

    share: float
    """Share of the threads' possible processor time that they got during the measurement"""

    def product_rate(self, rows: int) -> float:
        """Return the rate for this number of rows, or the nearest one measured."""
        return self.products[min(self.products, key=lambda measured_rows: abs(measured_rows - rows))]

    def merge_best(self, other: Ceilings) -> Ceilings:
        """Return the higher rates of two measurements."""
        return Ceilings(
            max(self.copy, other.copy),
            max(self.flops, other.flops),
            {
                rows: max(rates.get(rows, 0.0) for rates in (self.products, other.products))
                for rows in sorted({*self.products, *other.products})
            },
            min(self.share, other.share),
        )


def measure_ceilings(
    matrix: TensorHeader | PackedMatrix,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    rows: Collection[int],
    step_bytes: int,
) -> Ceilings:
    """matrix: a matrix of the model; rows: of the other factor, as in steps; step_bytes: bytes read by a step."""
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), device_context(device):
            rates = measure.measure(device, dtype)
            max_bytes = measure.buffer_bytes(device)
            copy = rates.copy if step_bytes >= max_bytes else measure_copy_rate(device, step_bytes)
            return Ceilings(
                copy,
                rates.flops,
                measure_product_rates(matrix, dtype, device, rows, min(step_bytes, max_bytes)),
                rates.share,
            )
    finally:
        torch.set_num_threads(previous_threads)


def measure_copy_rate(device: torch.device, size: int) -> float:
    """size: bytes read and bytes written together."""
    half = max(1, size // 2)
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    repeats = max(1, measure.buffer_bytes(device) // (2 * half))
    seconds = measure.median_seconds(
        measure.device_clock(device), lambda: [target.copy_(source) for _ in range(repeats)]
    )
    return repeats * 2 * half / seconds


def measure_packed_rate(dtype: torch.dtype) -> float:
    """Return bytes of INT4 weights per second in products of one row, on the CPU with torch's threads."""
    cpu, groups = torch.device("cpu"), PACKED_SHAPE[1] // PACKED_GROUP
    matrix = PackedMatrix(INT4, *PACKED_SHAPE, groups, PACKED_GROUP, "F16")
    with torch.inference_mode():
        return measure_product_rates(matrix, dtype, cpu, [1], measure.buffer_bytes(cpu))[1]


def measure_product_rates(
    matrix: TensorHeader | PackedMatrix,
    dtype: torch.dtype,
    device: torch.device,
    rows: Collection[int],
    most_bytes: int,
) -> dict[int, float]:
    """Return bytes of weights per second by rows of x. most_bytes: most bytes of distinct matrices."""
    [first] = kernels.prepare_weights(measured.sample_matrix(matrix, dtype, device))
    count = min(MAX_MATRICES, max(1, most_bytes // first.nbytes))
    weights = [
        first,
        *(kernels.prepare_weights(measured.sample_matrix(matrix, dtype, device))[0] for _ in range(count - 1)),
    ]
    clock = measure.device_clock(device)

    def rate(row_count: int) -> float:
        x = torch.ones(row_count, first.shape[1], dtype=dtype, device=device)
        used_weights = weights if row_count <= MAX_DECODE_ROWS else weights[:1]
        seconds = measure.median_seconds(clock, lambda: [kernels.linear(x, weight) for weight in used_weights])
        return len(used_weights) * first.nbytes / seconds

    return {row_count: rate(row_count) for row_count in sorted(rows)}


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

"""Measures a device's limits: copies, products of dense matrices, and products with matrices in the model's
format.

Measured while the model is loaded, with the same number of threads, so that both run under the same conditions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

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
    """Return bytes of weights per second by rows of x. most_bytes: maximum bytes of distinct matrices."""
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

"""What nothing on this device is faster than: copies, products of plain matrices, and products with matrices of a
model's own format. Measured beside the model, with as many threads, so that both had the same machine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.matrices import PackedMatrix
from localllm.hardware import measure
from localllm.plan import measured
from localllm.plan.memory import MAX_RUNNING
from localllm.runtime import kernels

MAX_MATRICES = 64


@dataclass(frozen=True)
class Ceilings:
    """Rates of a device. A copy counts bytes read and bytes written."""

    copy: float
    """Bytes/s, of as many bytes as a step reads, at most `rates.BUFFER_BYTES`: what caches hold is held against
    caches"""

    flops: float
    """Operations/s of products of plain matrices in the model's dtype"""

    products: dict[int, float]
    """Bytes/s of weights that products with matrices like the model's get through, by rows of the other factor"""

    share: float
    """Of the processor time that its threads could have had, what they got meanwhile"""

    def product_rate(self, rows: int) -> float:
        """With so many rows, or the nearest that was measured."""
        return self.products[min(self.products, key=lambda measured: abs(measured - rows))]

    def merge_best(self, other: Ceilings) -> Ceilings:
        """Of two measurements: what was reached once can be reached."""
        return Ceilings(
            max(self.copy, other.copy),
            max(self.flops, other.flops),
            {
                rows: max(kept.get(rows, 0.0) for kept in (self.products, other.products))
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
    """matrix: a matrix of the model; rows: of the other factor, as in steps; step_bytes: that a step reads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            found = measure.measure(device, dtype)
            most = measure.buffer_bytes(device)
            copy = found.copy if step_bytes >= most else measure_copy_rate(device, step_bytes)
            return Ceilings(
                copy,
                found.flops,
                measure_product_rates(matrix, dtype, device, rows, min(step_bytes, most)),
                found.share,
            )
    finally:
        torch.set_num_threads(before)


def measure_copy_rate(device: torch.device, size: int) -> float:
    """size: bytes read and bytes written together."""
    half = max(1, size // 2)
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = max(1, measure.buffer_bytes(device) // (2 * half))
    taken = measure.median_seconds(
        measure.device_clock(device), lambda: [target.copy_(source) for _ in range(times)]
    )
    return times * 2 * half / taken


def measure_product_rates(
    matrix: TensorHeader | PackedMatrix,
    dtype: torch.dtype,
    device: torch.device,
    rows: Collection[int],
    most_bytes: int,
) -> dict[int, float]:
    """Bytes/s of weights by rows of x. most_bytes: of different matrices."""
    [first] = kernels.prepare_weights(measured.sample_matrix(matrix, dtype, device))
    count = min(MAX_MATRICES, max(1, most_bytes // first.nbytes))
    weights = [
        first,
        *(kernels.prepare_weights(measured.sample_matrix(matrix, dtype, device))[0] for _ in range(count - 1)),
    ]
    clock = measure.device_clock(device)

    def rate(of_rows: int) -> float:
        x = torch.ones(of_rows, first.shape[1], dtype=dtype, device=device)
        used = weights if of_rows <= MAX_RUNNING else weights[:1]
        taken = measure.median_seconds(clock, lambda: [kernels.linear(x, weight) for weight in used])
        return len(used) * first.nbytes / taken

    return {of_rows: rate(of_rows) for of_rows in sorted(rows)}

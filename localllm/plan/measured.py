"""Which rates this machine reaches with a model's own format of weights: measured in half a second on matrices of
the size of its layers.

A copy, or a product of plain matrices, says little of that: on the CPU blocks of GGUF are unpacked on the way.
Imports torch inside functions, as `device.py` does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.matrices import PackedMatrix
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.packing import FP8, INT4, stays_packed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from localllm.quant.tensor import QuantizedTensor

BUFFER_BYTES = 2**28  # of different matrices, several times what caches hold
DECODE_S, PREFILL_S, CALL_S = 0.3, 0.2, 0.02  # so long is measured, after a first round that does not count
PREFILL_ROWS = 512  # of a prefill step
FILL_BYTE = 0x3C  # every byte: no format makes NaN, infinity or a denormal number of it
# Of these rates a whole step reaches at least so much, as answers of a 1B model on two cores have shown
# (bench/plan.py): there are matrices of less handy shapes, the head, attention and the cache.
DECODE_SHARE, PREFILL_SHARE = 0.7, 0.55
CALLS_PER_LAYER = 25  # small operations that a layer takes as long as, beside its matrices: Llamas of 1 to 6 MB


@dataclass(frozen=True)
class StepRates:
    """What steps can be expected to reach."""

    bandwidth: float  # bytes/s
    flops: float
    layer_s: float  # of each layer, beside its matrices


def measure_matmul(
    tensor: TensorHeader | PackedMatrix, dtype: torch.dtype, device: torch.device, threads: int
) -> StepRates:
    """With products of one row and of many, on matrices like `tensor`."""
    import torch

    from localllm.runtime import kernels

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            [first] = kernels.prepare_weights(sample_matrix(tensor, dtype, device))
            count = max(2, min(BUFFER_BYTES // first.nbytes, 64))
            weights = [
                first,
                *(kernels.prepare_weights(sample_matrix(tensor, dtype, device))[0] for _ in range(count - 1)),
            ]
            columns = first.shape[1]
            row, rows = (torch.ones(n, columns, dtype=dtype, device=device) for n in (1, PREFILL_ROWS))
            small, scale = torch.ones(1, 64, dtype=dtype, device=device), torch.ones(64, device=device)
            one = time_call(lambda i: kernels.linear(row, weights[i % count]), count, DECODE_S, device)
            many = time_call(lambda i: kernels.linear(rows, weights[i % count]), 1, PREFILL_S, device)
            call = time_call(lambda i: kernels.rms_norm(small, scale, 1e-5), 100, CALL_S, device)
    finally:
        torch.set_num_threads(before)
    products = 2 * PREFILL_ROWS * first.shape[0] * columns
    return StepRates(DECODE_SHARE * first.nbytes / one, PREFILL_SHARE * products / many, CALLS_PER_LAYER * call)


def sample_matrix(
    tensor: TensorHeader | PackedMatrix, dtype: torch.dtype, device: torch.device
) -> Tensor | QuantizedTensor:
    """One as `tensor` is held: of its shape and format, and of no particular numbers."""
    import torch

    from localllm.quant.formats import gguf, mxfp4
    from localllm.quant.tensor import QuantizedTensor

    SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}

    def filled(*shape: int) -> Tensor:
        return torch.full(shape, FILL_BYTE, dtype=torch.uint8, device=device)

    def plain(rows: int, columns: int) -> Tensor:
        return torch.full((rows, columns), 0.01, dtype=dtype, device=device)

    if isinstance(tensor, PackedMatrix):
        rows, columns, groups = tensor.rows, tensor.columns, tensor.group_count
        if not stays_packed(tensor.format, device.type):
            return plain(rows, columns)
        q = filled(rows, tensor.code_bytes // rows)
        kept = q if tensor.format == INT4 else q.view(torch.float8_e4m3fn if tensor.format == FP8 else torch.int8)
        parts = {"q": kept, "scale": torch.ones(rows, groups, dtype=SCALES.get(tensor.scale_dtype, torch.float32))}
        if tensor.has_zeros:
            parts["zero"] = torch.ones(rows, groups, dtype=torch.uint8 if tensor.format == INT4 else torch.int8)
        if tensor.act_order:
            parts["columns"] = torch.randperm(columns)
        parts = {name: part.to(device) for name, part in parts.items()}
        return QuantizedTensor(tensor.format, (rows, columns), parts, tensor.group_size)
    if tensor.dtype == "U8":
        rows, groups, _ = tensor.shape
        parts = {"q": filled(*tensor.shape), "scale": filled(rows, groups)}
        return QuantizedTensor(mxfp4.MXFP4_FORMAT, (rows, groups * mxfp4.MXFP4_GROUP), parts)
    rows, columns = tensor.shape
    if tensor.offset is not None and tensor.dtype != "F32":
        form = tensor.dtype.lower()
        return QuantizedTensor(
            form, (rows, columns), {gguf.BLOCKS_PART: filled(rows, BLOCK_TYPE_BY_NAME[form].row_bytes(columns))}
        )
    return plain(rows, columns)


def time_call(run: Callable[[int], object], warmup_calls: int, duration_s: float, device: torch.device) -> float:
    """Of one call: the median of as many as `duration_s` seconds hold, after `warmup_calls` that do not count."""
    for i in range(warmup_calls):
        run(i)
    synchronize(device)
    taken: list[float] = []
    end = time.perf_counter() + duration_s
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        run(len(taken))
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU is still working on."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)

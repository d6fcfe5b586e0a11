"""Measures the rates that this machine reaches with a model's weight format, in half a second, on matrices of the
size of its layers.

A copy, or a product of dense matrices, predicts them poorly: on a CPU, for example, GGUF blocks are dequantized in
the product. Imports torch inside functions, like `device.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.matrices import PackedMatrix
from localllm.hardware.device import device_context, dtype_name
from localllm.hardware.processor import matrix_dtype_for
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.packing import FP8, INT4, MXFP4, stays_packed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from localllm.quant.tensor import QuantizedTensor  # imports torch

BUFFER_BYTES = 2**28  # of different matrices, several times the size of caches
DECODE_S, PREFILL_S, CALL_S = 0.3, 0.2, 0.02  # duration of measurements, after a warm-up that is not counted
PREFILL_ROWS = 512  # of a prefill step
FILL_BYTE = 0x3C  # of every byte: in no format is it NaN, infinity or a denormal number
# A step reaches at least this share of the measured rates, according to answers of a 1B model on two cores
# (bench/plan.py): other matrices have less favourable shapes, and there are the head, attention and the cache.
DECODE_SHARE, PREFILL_SHARE = 0.7, 0.55
# A layer's overhead besides its matrices, in small operations: on a CPU of Llamas of 1 to 6 MB, on a GPU the
# kernels of a captured step without the four products.
CALLS_PER_LAYER = {"cpu": 25, "cuda": 5}
NORMS = 100  # in a graph


@dataclass(frozen=True)
class StepRates:
    """Rates that steps are expected to reach."""

    bandwidth: float  # bytes/s
    flops: float
    layer_s: float  # seconds per layer, besides its matrices


def measure_matmul(
    tensor: TensorHeader | PackedMatrix, dtype: torch.dtype, device: torch.device, threads: int
) -> StepRates:
    """Measure products of one row and of many rows with matrices like `tensor`."""
    import torch

    from localllm.hardware.gpu_clock import capture, seconds
    from localllm.runtime import kernels

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), device_context(device):
            [first] = kernels.prepare_weights(sample_matrix(tensor, dtype, device))
            count = max(2, min(BUFFER_BYTES // first.nbytes, 64))
            weights = [
                first,
                *(kernels.prepare_weights(sample_matrix(tensor, dtype, device))[0] for _ in range(count - 1)),
            ]
            columns = first.shape[1]
            row, rows = (torch.ones(n, columns, dtype=dtype, device=device) for n in (1, PREFILL_ROWS))
            small, scale = torch.ones(1, 64, dtype=dtype, device=device), torch.ones(64, device=device)
            if device.type == "cuda":
                # One row, in graphs as in a step: launched by the host, they would take less time than their
                # launches.
                products_of_row = capture(lambda: [kernels.linear(row, weight) for weight in weights], device)
                norms = capture(lambda: [kernels.rms_norm(small, scale, 1e-5) for _ in range(NORMS)], device)
                row_s, call_s = seconds(products_of_row, device) / count, seconds(norms, device) / NORMS
                rows_s = seconds(lambda: kernels.linear(rows, first), device)
            else:
                row_s = time_call(lambda i: kernels.linear(row, weights[i % count]), count, DECODE_S)
                rows_s = time_call(lambda i: kernels.linear(rows, weights[i % count]), 1, PREFILL_S)
                call_s = time_call(lambda i: kernels.rms_norm(small, scale, 1e-5), 100, CALL_S)
    finally:
        torch.set_num_threads(threads_before)
    products = 2 * PREFILL_ROWS * first.shape[0] * columns
    calls = CALLS_PER_LAYER[device.type]
    return StepRates(DECODE_SHARE * first.nbytes / row_s, PREFILL_SHARE * products / rows_s, calls * call_s)


def sample_matrix(
    tensor: TensorHeader | PackedMatrix, dtype: torch.dtype, device: torch.device
) -> Tensor | QuantizedTensor:
    """Return a matrix in the format and shape of `tensor` with arbitrary values."""
    import torch

    from localllm.quant.formats import gguf
    from localllm.quant.formats.groups import MXFP4_GROUP
    from localllm.quant.tensor import QuantizedTensor  # imports torch

    SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}

    def fill_bytes(*shape: int) -> Tensor:
        return torch.full(shape, FILL_BYTE, dtype=torch.uint8, device=device)

    def dense(rows: int, columns: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.full((rows, columns), 0.01, dtype=dtype, device=device)

    if isinstance(tensor, PackedMatrix):
        rows, columns, groups = tensor.rows, tensor.columns, tensor.group_count
        if not stays_packed(tensor.format, device.type):
            return dense(rows, columns)
        q = fill_bytes(rows, tensor.code_bytes // rows)
        codes = q if tensor.format == INT4 else q.view(torch.float8_e4m3fn if tensor.format == FP8 else torch.int8)
        parts = {
            "q": codes,
            "scale": torch.ones(rows, groups, dtype=SCALES.get(tensor.scale_dtype, torch.float32)),
        }
        if tensor.has_zeros:
            parts["zero"] = torch.ones(rows, groups, dtype=torch.uint8 if tensor.format == INT4 else torch.int8)
        if tensor.act_order:
            parts["columns"] = torch.randperm(columns)
        parts = {name: part.to(device) for name, part in parts.items()}
        return QuantizedTensor(tensor.format, (rows, columns), parts, tensor.group_size)
    if tensor.dtype == "U8":
        rows, groups, _ = tensor.shape
        parts = {"q": fill_bytes(*tensor.shape), "scale": fill_bytes(rows, groups)}
        return QuantizedTensor(MXFP4, (rows, groups * MXFP4_GROUP), parts)
    rows, columns = tensor.shape
    if (kept := getattr(torch, matrix_dtype_for(tensor.dtype, dtype_name(dtype), device.type))) != dtype:
        return dense(rows, columns, kept)
    if tensor.offset is not None and tensor.dtype != "F32":
        block_format = tensor.dtype.lower()
        return QuantizedTensor(
            block_format,
            (rows, columns),
            {gguf.BLOCKS_PART: fill_bytes(rows, BLOCK_TYPE_BY_NAME[block_format].row_bytes(columns))},
        )
    return dense(rows, columns)


def time_call(run: Callable[[int], object], warmup_calls: int, duration_s: float) -> float:
    """Return the median duration of a call in `duration_s` seconds, after `warmup_calls` uncounted calls."""
    for i in range(warmup_calls):
        run(i)
    durations: list[float] = []
    end = time.perf_counter() + duration_s
    while not durations or time.perf_counter() < end:
        start = time.perf_counter()
        run(len(durations))
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)

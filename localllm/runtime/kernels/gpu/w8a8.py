"""Products with INT8 weights whose activations are quantized to INT8, too, with a scale per token:

y[t, o] = x_scale[t] * scale[o] * sum over i of x_q[t, i] q[o, i]

Few rows are multiplied like INT8 weights: integers up to 127 are exact in bfloat16 and float16, and their products
in float32. Many are multiplied as INT8 on tensor cores, exactly, with the codes of W unpacked to the scratch
buffer: 1 byte read, written and read per weight.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quant.formats.gpu_packed import as_int8
from localllm.quant.formats.groups import quantize_activations
from localllm.quant.packing import W8A8_GPU_PACKED
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.gpu.dequantize import (
    DTYPES,
    MIN_DEQUANTIZE_ROWS,
    dequantize_rows,
    scratch_lock,
    scratch_rows,
    shared_scratch,
)
from localllm.runtime.kernels.gpu.launch import gpu_unsupported, meta_packed_weight, meta_tensor
from localllm.runtime.kernels.gpu.quantized_gemm import quantized_gemm
from localllm.runtime.kernels.gpu.small_m import MAX_ROWS
from localllm.runtime.kernels.gpu.small_m_packed import packed_matmul
from localllm.runtime.kernels.linear import flatten_rows
from localllm.runtime.kernels.registry import kernel


def w8a8_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if reason := gpu_unsupported(x):
        return reason
    if weight.format != W8A8_GPU_PACKED:
        return f"the weight is {weight.format}"
    return None if x.dtype in DTYPES else f"x is {x.dtype}"


@kernel("linear", "triton-w8a8", w8a8_unsupported, first=True)
def linear_w8a8(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return flatten_rows(w8a8_matmul, x, weight, bias)


def w8a8_matmul(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Quantize x and multiply. x: [M, in] -> [M, out]"""
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    tokens, scale = quantize_activations(x)
    if len(x) >= MIN_DEQUANTIZE_ROWS:
        return int8_matmul(tokens, weight, scale).to(x.dtype)
    codes, int8 = tokens.to(x.dtype), as_int8(weight)
    if len(x) <= MAX_ROWS:
        y = packed_matmul(codes, int8, dtype=torch.float32)
    else:
        y = quantized_gemm(codes, int8, None, dtype=torch.float32)
    return y.mul_(scale).to(x.dtype)


def int8_matmul(tokens: Tensor, weight: QuantizedTensor, scale: Tensor) -> Tensor:
    """Multiply integers in parts. tokens: [M, in] float32; scale: [M, 1] -> [M, out] float32"""
    count, columns = weight.shape
    _, chunks, _, words = weight.parts["q"].shape
    row_scale = weight.parts["scale"][:1].float()  # [1, padded rows]
    # Multiples of 16 in both directions, as tensor cores need them; codes of padding are 0.
    padded_columns, padded_rows = chunks * words * 2, row_scale.shape[1]
    x = F.pad(tokens, (0, padded_columns - columns)).to(torch.int8)
    codes = replace(as_int8(weight), parts={"q": weight.parts["q"], "scale": torch.ones_like(row_scale)})
    y = tokens.new_empty(len(x), padded_rows)
    part_rows = min(padded_rows, -(-scratch_rows(weight) // 16) * 16)
    with scratch_lock:
        w = shared_scratch(tokens.device, part_rows * padded_columns, torch.int8).view(-1, padded_columns)
        for begin in range(0, padded_rows, part_rows):
            part = w[: padded_rows - begin]
            dequantize_rows(codes, begin, part)
            y[:, begin : begin + len(part)] = torch.ops.aten._int_mm(x, part.T)
    return y.mul_(scale).mul_(row_scale)[:, :count]


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    weight = replace(meta_packed_weight("int8", 4096, 14336, None), format=W8A8_GPU_PACKED)
    for rows in (1, 64, 2048):
        yield f"W8A8, 4096 x 14336, M {rows}", lambda rows=rows: w8a8_matmul(meta_tensor(rows, 14336), weight)

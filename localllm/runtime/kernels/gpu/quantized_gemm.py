"""y = x W^T + bias (+ residual) with packed W, for 17 to 127 rows of x: W is dequantized inside the product.

It also serves fewer rows if no other kernel supports the format. A program processes 64 rows of W as the rows of a
tensor core's product, so that dequantized values pass from registers directly, and up to 128 rows of x as its
columns: so each weight is read and dequantized once. Columns of W are split if there are fewer programs than
multiprocessors; a second kernel adds the parts' sums in order. The number of parts depends on W alone, not on x.
Bytes: packed W once per block of x, and 4 M out per part, written and read.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.fused import Matrices
from localllm.runtime.kernels.gpu.chunks import (
    accumulate_chunk,
    apply_row_scale,
    pipeline_stages,
    scale_applies_last,
    weight_arguments,
)
from localllm.runtime.kernels.gpu.dequantize import MIN_DEQUANTIZE_ROWS, packed_unsupported, reorder_columns
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_of,
    launch_kernel,
    meta_packed_weight,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.linear import flatten_rows
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import kernel

BLOCK_ROWS = 64  # of W: the minimum that a Hopper product reads from registers
WARPS = 4
WGMMA_ARCH = 90  # its products read x from shared memory; on others, 128 rows of x take too many registers
MAX_SPLIT_K, MIN_SPLIT_COLUMNS = 8, 1024  # estimated: the parts' sums should be small compared with the weights
SUM_ELEMENTS = 1024  # per program


@triton.jit(do_not_specialize=["M"])
def quantized_gemm_kernel(
    p_q,
    p_scale,
    p_zero,
    p_minimum,
    p_block_scale,
    p_block_minimum,
    p_x,
    p_bias,
    p_residual,
    p_y,
    stored,
    chunks,
    chunks_a_part,
    M,
    N,
    K,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    LAST: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y [M, N], or with PARTS > 1 float32 [PARTS, M, N] without bias and residual."""
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    b_out = tl.program_id(0) * BN + tl.arange(0, BN)
    b_x = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    m_row, m_x = b_out < N, b_x < M
    b_row = b_out.to(tl.int64)
    b_p_x = p_x + b_x.to(tl.int64) * K
    acc = tl.zeros((BN, BM), tl.float32)
    for chunk in range(part * chunks_a_part, tl.minimum((part + 1) * chunks_a_part, chunks)):
        acc = accumulate_chunk(
            acc, p_q, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored, chunks, b_row, m_row,
            chunk, b_p_x, m_x, K, KIND, W, GROUP, BLOCK, SHARE, LAST,
        )  # fmt: skip
    y = tl.trans(apply_row_scale(acc, p_scale, b_row, m_row, LAST))
    m_y = m_x[:, None] & m_row[None, :]
    at = b_x.to(tl.int64)[:, None] * N + b_out[None, :]
    if PARTS == 1:
        if p_bias is not None:
            y += tl.load(p_bias + b_out, mask=m_row, other=0).to(tl.float32)[None, :]
        if p_residual is not None:
            y += tl.load(p_residual + at, mask=m_y, other=0).to(tl.float32)
    tl.store(p_y + part.to(tl.int64) * M * N + at, y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["M"])
def split_k_sum_kernel(
    p_parts, p_bias, p_residual, p_y, M, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """y [M, N] = sum of the parts in order + bias + residual"""
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_y = at < M * N
    y = tl.load(p_parts + at, mask=m_y, other=0)
    for part in tl.static_range(1, PARTS):
        y += tl.load(p_parts + part * (M * N).to(tl.int64) + at, mask=m_y, other=0)
    if p_bias is not None:
        y += tl.load(p_bias + at % N, mask=m_y, other=0).to(tl.float32)
    if p_residual is not None:
        y += tl.load(p_residual + at, mask=m_y, other=0).to(tl.float32)
    tl.store(p_y + at, y.to(p_y.dtype.element_ty), mask=m_y)


def quantized_gemm(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply. x: [M, in] -> [M, out] in `dtype` or that of x; bias: [out]; residual: [M, out]"""
    x, (count, columns) = reorder_columns(x, weight), weight.shape
    arguments = weight_arguments(weight)
    y = x.new_empty(len(x), count, dtype=dtype or x.dtype)
    if y.numel() == 0:
        return y
    chunks, parts = arguments["chunks"], split_k(weight, x.device)
    rows, stages = choose_tile(len(x), arguments, x)
    single_part = parts == 1
    partial = y if single_part else x.new_empty(parts, *y.shape, dtype=torch.float32)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    launch_kernel(
        quantized_gemm_kernel,
        (triton.cdiv(count, BLOCK_ROWS), triton.cdiv(len(x), rows), parts),
        WARPS,
        stages,
        device=x.device,
        **arguments,
        LAST=scale_applies_last(weight),
        p_x=x,
        p_bias=bias if single_part else None,
        p_residual=residual if single_part else None,
        p_y=partial,
        chunks_a_part=triton.cdiv(chunks, parts),
        M=len(x),
        N=count,
        K=columns,
        PARTS=parts,
        BN=BLOCK_ROWS,
        BM=rows,
    )
    if not single_part:
        grid = (triton.cdiv(y.numel(), SUM_ELEMENTS),)
        sum_arguments = {
            "p_parts": partial,
            "p_bias": bias,
            "p_residual": residual,
            "p_y": y,
            "M": len(x),
            "N": count,
        }
        launch_kernel(
            split_k_sum_kernel, grid, WARPS, device=x.device, **sum_arguments, PARTS=parts, BLOCK=SUM_ELEMENTS
        )
    return y


def choose_tile(count: int, arguments: dict[str, Any], x: Tensor) -> tuple[int, int]:
    """Return the rows of x per program, and the chunks in flight."""
    max_rows = MIN_DEQUANTIZE_ROWS if gpu_of(x.device).arch == WGMMA_ARCH else 64
    rows = min(max(triton.next_power_of_2(count), 16), max_rows)
    while rows > 16 and pipeline_stages(arguments, BLOCK_ROWS, rows, x) == 1:
        rows //= 2
    return rows, pipeline_stages(arguments, BLOCK_ROWS, rows, x)


def split_k(weight: QuantizedTensor, device: torch.device) -> int:
    """Return the number of parts of the columns that gives every multiprocessor a program."""
    rows, columns = weight.shape
    parts = gpu_of(device).multiprocessors // triton.cdiv(rows, BLOCK_ROWS)
    return max(1, min(parts, columns // MIN_SPLIT_COLUMNS, MAX_SPLIT_K))


def gemm_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if reason := packed_unsupported(x, weight):
        return reason
    rows = x.shape[:-1].numel()
    return None if rows < MIN_DEQUANTIZE_ROWS else f"{rows} rows: dequantizing first is faster"


@kernel("linear", "triton-gemm", gemm_unsupported, first=True)
def linear_gemm(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return flatten_rows(lambda rows, w: quantized_gemm(rows, w, bias), x, weight, None)


def fused_gemm_unsupported(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> str | None:
    if residual is None or activation or len(weights) > 1 or not isinstance(weights[0], QuantizedTensor):
        return "it is not a product of one packed matrix with a residual"
    return gemm_unsupported(x, weights[0], bias)


@kernel("fused_linear", "triton-gemm", fused_gemm_unsupported, first=True)
def fused_gemm(
    x: Tensor,
    weights: tuple[QuantizedTensor],
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor,
) -> Tensor:
    return quantized_gemm(norm(x) if norm else x, weights[0], bias, residual)


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    shapes = (("int4", 128, 127), ("int8", None, 127), ("q4_k", 32, 64), ("q6_k", 16, 32), ("fp8", 128, 16))
    for form, group, rows in shapes:
        weight, x = meta_packed_weight(form, 4096, 14336, group), meta_tensor(rows, 14336)
        name = f"{form}, group {group or 'of a row'}, 4096 x 14336, M {rows}"
        yield name, lambda weight=weight, x=x: quantized_gemm(x, weight, None, x[:, :4096])

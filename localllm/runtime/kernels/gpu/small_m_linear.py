"""Selects the products for the kernels for few rows: decoding, and verification of drafts.

A norm before the product is prepared by the product that computes x (small_m.py), or is a separate kernel. If it
were fused entirely, every program would square, scale and round the part of x that it reads, 16 columns for 64
rows of W, about 0.8 instructions per weight in addition to the 2.1 of INT4 (estimated).
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (Triton code is written in Python syntax but typed differently)

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import Activation
from localllm.hardware.device import dtype_name
from localllm.quant.packing import PLANES_PER_WORD
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.fused import Matrices
from localllm.runtime.kernels.gpu import small_m_packed
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    dot,
    gpu_of,
    gpu_unsupported,
    launch_kernel,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.small_m import (
    L2_LINE_BYTES,
    MAX_ROWS,
    norm_arguments,
    padded_rows,
    prefetch_l2,
    reduce_splits,
    split_workspace,
    tile_row_ids,
)
from localllm.runtime.kernels.gpu.tiles import Tile, tile_for, tile_grid
from localllm.runtime.kernels.norm import FollowingNorm, Norm, PreparedNorm
from localllm.runtime.kernels.registry import kernel

# Products of few rows with dense weights: bfloat16, float16 or float32, the same as x.

PREFETCH_CHUNKS = tl.constexpr(4)  # chunks that are prefetched before waiting for x


@triton.jit(do_not_specialize=["parts", "M", "share", "tiles"])
def small_m_dense_kernel(
    p_x,
    p_w,
    p_bias,
    p_residual,
    p_squares,
    p_gain,
    p_scaled,
    p_parts,
    p_o,
    p_partial,
    p_ticket,
    eps,
    parts,
    M,
    N,
    K,
    share,
    tiles,
    BLOCK: tl.constexpr,
    X_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CUT: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [M, K], M <= X_ROWS, w [N, K]; each split of a tile processes `share` chunks of COLUMNS columns."""
    tile = tl.program_id(0)
    i_n = tile_row_ids(tile, N, BLOCK, ACTIVATION != "")
    i_k = tl.arange(0, COLUMNS)
    i_m = tl.arange(0, X_ROWS)
    first = tl.program_id(1) * share * COLUMNS
    last = tl.minimum(first + share * COLUMNS, K)
    p_row = p_w + i_n.to(tl.int64)[:, None] * K
    p_columns = p_x + i_m[None, :] * K + i_k[:, None]
    m_x = (i_m < M)[None, :]

    STEP: tl.constexpr = L2_LINE_BYTES * 8 // p_w.dtype.element_ty.primitive_bitwidth  # elements in a line
    prefetch_l2(p_row + tl.minimum(first + tl.arange(0, PREFETCH_CHUNKS * COLUMNS // STEP) * STEP, K - 1)[None, :])

    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK, X_ROWS), tl.float32)
    for k in range(first, last, COLUMNS):
        if WHOLE_CHUNKS:
            w = tl.load(p_row + (k + i_k)[None, :], eviction_policy="evict_first")
            x = tl.load(p_columns + k, mask=m_x, other=0.0)
        else:
            m_k = k + i_k < K
            w = tl.load(p_row + (k + i_k)[None, :], mask=m_k[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(p_columns + k, mask=m_x & m_k[:, None], other=0.0)
        acc = dot(w, x, acc)
    allow_next_kernel(PDL)
    reduce_splits(
        acc, p_bias, p_residual, p_squares, p_gain, p_scaled, p_parts, p_o, p_partial, p_ticket,
        eps, parts, tile, tiles, N, K, M, BLOCK, CUT, PARTS, ACTIVATION,
    )  # fmt: skip


def dense_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    norm: PreparedNorm | None = None,
    following: FollowingNorm | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply. x: [M, in], M <= 16; weight: [out, in], contiguous, of the same dtype.

    Returns [M, out], or half as many columns with an activation.
    """
    x = x.contiguous()
    rows, columns = weight.shape
    chunk = 32 if x.dtype == torch.float32 else 128
    chunks = -(-columns // chunk)
    gpu = gpu_of(x.device)
    tile = tile or tile_for(gpu, dtype_name(x.dtype), rows, columns, chunks)
    grid = tile_grid(tile, rows, chunks)
    x_rows = padded_rows(len(x), gpu)
    partial, ticket = split_workspace(grid, tile.block_rows, x_rows, x.device)
    y = torch.empty(len(x), rows // 2 if activation else rows, dtype=x.dtype, device=x.device)
    launch_kernel(
        small_m_dense_kernel,
        (grid.tiles, grid.splits),
        tile.warps,
        tile.stages,
        device=x.device,
        p_x=x,
        p_w=weight,
        p_bias=bias,
        p_residual=None if residual is None else residual.contiguous(),
        **norm_arguments(y, grid.tiles, norm, following),
        p_o=y,
        p_partial=partial,
        p_ticket=ticket,
        M=len(x),
        N=rows,
        K=columns,
        share=grid.chunks_per_split,
        tiles=grid.tiles,
        BLOCK=tile.block_rows,
        X_ROWS=x_rows,
        COLUMNS=chunk,
        CUT=grid.splits > 1,
        WHOLE_CHUNKS=columns % chunk == 0,
        ACTIVATION=activation or "",
    )
    return y


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    yield (
        "bfloat16, 28672 x 4096, gated",
        lambda: dense_matmul(meta_tensor(1, 4096), meta_tensor(28672, 4096), activation="silu"),
    )
    yield "bfloat16, 2048 x 8192, M 16", lambda: dense_matmul(meta_tensor(16, 8192), meta_tensor(2048, 8192))


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def small_m_unsupported(x: Tensor, weight: Tensor | QuantizedTensor, *_: object) -> str | None:
    if reason := gpu_unsupported(x):
        return reason
    rows = x.shape[:-1].numel()
    if not 1 <= rows <= MAX_ROWS:
        return f"{rows} rows, not 1 to {MAX_ROWS}"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}"
    if isinstance(weight, QuantizedTensor):
        return None if weight.format in PLANES_PER_WORD else f"the weight is {weight.format}"
    if weight.dtype != x.dtype:
        return f"the weight is {weight.dtype}, x {x.dtype}"
    return None if weight.dim() == 2 and weight.is_contiguous() else "the weight is not a contiguous matrix"


def small_m_matmul(
    x: Tensor,
    weight: Tensor | QuantizedTensor,
    bias: Tensor | None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    norm: PreparedNorm | None = None,
    following: FollowingNorm | None = None,
) -> Tensor:
    """Like `fused_linear`; x with any dimensions before the last, or `scaled` of a norm."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, QuantizedTensor):
        y = small_m_packed.packed_matmul(rows, weight, bias, activation, residual, norm, following)
    else:
        y = dense_matmul(rows, weight, bias, activation, residual, norm, following)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@kernel("linear", "triton-skinny-planes", small_m_unsupported, first=True)
def linear_small_m(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return small_m_matmul(x, weight, bias)


@kernel("plain_linear", "triton-skinny", small_m_unsupported, first=True)
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return small_m_matmul(x, weight, bias)


def fused_small_m_unsupported(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> str | None:
    if len(weights) != 1:
        return f"{len(weights)} matrices"
    return small_m_unsupported(x, weights[0])


@kernel("fused_linear", "triton-skinny", fused_small_m_unsupported, first=True)
def fused_linear(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> Tensor:
    [weight] = weights
    if isinstance(norm, PreparedNorm) and norm.x is x:
        return small_m_matmul(norm.scaled, weight, bias, activation, residual, norm)
    return small_m_matmul(norm(x) if norm else x, weight, bias, activation, residual)


def residual_small_m_unsupported(
    x: Tensor, weights: Matrices, bias: Tensor | None, residual: Tensor | None, following: FollowingNorm
) -> str | None:
    if reason := fused_small_m_unsupported(x, weights, bias, None, None, residual):
        return reason
    if x.dtype == torch.float16:
        return "x times the norm's weight may exceed the range of float16"
    norm = following.norm
    return None if type(norm) is Norm and norm.norm_type == "rms" and norm.weight is not None else "another norm"


@kernel("residual_linear", "triton-skinny", residual_small_m_unsupported, first=True)
def residual_linear(
    x: Tensor, weights: Matrices, bias: Tensor | None, residual: Tensor | None, following: FollowingNorm
) -> Tensor:
    [weight] = weights
    return small_m_matmul(x, weight, bias, None, residual, following=following)

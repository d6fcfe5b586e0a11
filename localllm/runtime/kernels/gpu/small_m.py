"""Parts of products with few rows of x (M = 1 to 16), for any weight format.

y[m, n] = sum over k of W[n, k] x[m, k]: W provides the rows that tensor cores need many of, and x, transposed and
padded to 8 or 16 columns, the dimension that is small. So one program serves M = 1 to 16 in the same time, that of
reading W, and a row's result depends neither on M nor on the other rows: tensor cores multiply 8 columns at once,
each in the same order.

A program processes BLOCK rows of W and a part of their columns, so that all multiprocessors have loads in flight.
If the columns are split, each program writes its sums (float32) to a workspace and draws a ticket; the one that
draws the last ticket adds all parts in order, and finishes. Which program that is does not affect the result.

Before it waits for x, a program prefetches the weights that it reads first into L2, and while it computes, those
that it reads later: so more bytes are on their way from memory than registers or shared memory could receive. The
next kernel may only start when it has read all weights: when it could start at once, its prefetches and programs
made a step of an 8B INT4 model on an H100 7% slower, and one of eight sequences 10%, with tiles by rule.

An RMS norm between two products needs no kernel: W norm(x) = (W (x * weight)) * factor, with one factor per row.
The product that computes x also writes x * weight, and each tile's sum of squares. The next one multiplies x *
weight and scales its sums by the factor, which follows from all squares.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (Triton code is written in Python syntax but typed differently)

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.activations import apply_gate
from localllm.runtime.kernels.gpu.launch import PTX, Gpu
from localllm.runtime.kernels.gpu.rounding import round_to_dtype, sum_in_pairs
from localllm.runtime.kernels.gpu.tiles import TileGrid
from localllm.runtime.kernels.norm import FollowingNorm, PreparedNorm

MAX_ROWS = 16
TENSOR_CORE_COLUMNS = 8  # of the smallest product of NVIDIA's tensor cores; AMD's has 16
MAX_TICKETS = 1024  # more than the number of tiles whose columns are split
L2_LINE_BYTES = tl.constexpr(128)  # bytes of L2
PREFETCH_ASM = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@cache
def ticket_counters(device: torch.device) -> Tensor:
    """Return int32 [MAX_TICKETS], zero between any two products.

    There is one per device: products of one stream run one after another. The first product on a device must not
    be one that is being captured.
    """
    return torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)


def padded_rows(rows: int, gpu: Gpu) -> int:
    """Return the number of rows that x, with `rows` rows, is padded to."""
    return TENSOR_CORE_COLUMNS if rows <= TENSOR_CORE_COLUMNS and not gpu.amd_arch else MAX_ROWS


def split_workspace(
    grid: TileGrid, block: int, x_rows: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the workspace for partial sums, and the tickets."""
    if grid.splits == 1:
        return None, None
    assert grid.tiles <= MAX_TICKETS
    return torch.empty(grid.splits * grid.tiles * block * x_rows, device=device), ticket_counters(device)


def norm_arguments(
    y: Tensor, tiles: int, norm: PreparedNorm | None, following: FollowingNorm | None
) -> dict[str, Any]:
    """Return a kernel's arguments for the norm of x, whose `scaled` it multiplies, and for the norm of its result
    y, which it prepares.
    """
    arguments: dict[str, Any] = {"p_squares": None, "eps": 0.0, "parts": 0, "PARTS": 0}
    arguments |= {"p_gain": None, "p_scaled": None, "p_parts": None}
    if norm:
        parts = norm.squares.shape[1]
        arguments |= {"p_squares": norm.squares, "eps": norm.eps, "parts": parts}
        arguments["PARTS"] = triton.next_power_of_2(parts)
    if following:
        following.scaled = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        following.squares = torch.empty(len(y), tiles, dtype=torch.float32, device=y.device)
        arguments |= {"p_gain": following.norm.weight, "p_scaled": following.scaled, "p_parts": following.squares}
    return arguments


@triton.jit
def tile_row_ids(tile, N, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of W of a program, [BLOCK], clamped to the last; GATED: half are gates, half their up
    rows.
    """
    i_row = tl.arange(0, BLOCK)
    if GATED:
        half = i_row % (BLOCK // 2)
        i_gate = tl.minimum(tile * (BLOCK // 2) + half, N // 2 - 1)
        return tl.where(i_row < BLOCK // 2, i_gate, N // 2 + i_gate)
    return tl.minimum(tile * BLOCK + i_row, N - 1)


@triton.jit
def prefetch_l2(p):
    """Prefetch lines into L2. p: pointers, one per line"""
    if PTX:
        tl.inline_asm_elementwise(PREFETCH_ASM, "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_squares(p_squares, parts, M, PARTS: tl.constexpr, X_ROWS: tl.constexpr):
    """Return the sums of squares of the parts of rows of x, [PARTS, X_ROWS].

    p_squares: [M, parts] float32; PARTS: a power of two of at least `parts`, or 0 without a norm
    """
    if PARTS == 0:
        return 0.0
    else:
        i_part = tl.arange(0, PARTS)[:, None]
        i_m = tl.arange(0, X_ROWS)[None, :]
        return tl.load(p_squares + i_m * parts + i_part, mask=(i_part < parts) & (i_m < M), other=0.0)


@triton.jit
def reduce_splits(
    acc,
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
    tile,
    tiles,
    N,
    K,
    M,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add up a program's sums acc [BLOCK, rows of x] float32; write o [M, N], or [M, N / 2] with an activation."""
    X_ROWS: tl.constexpr = acc.shape[1]
    if not CUT:
        squares = load_squares(p_squares, parts, M, PARTS, X_ROWS)
        write_output(
            acc, squares, p_bias, p_residual, p_gain, p_scaled, p_parts, p_o,
            eps, tile, tiles, N, K, M, BLOCK, PARTS, ACTIVATION,
        )  # fmt: skip
    else:
        i_part = tl.arange(0, BLOCK)[:, None] * X_ROWS + tl.arange(0, X_ROWS)[None, :]
        p_part = p_partial + tile * (BLOCK * X_ROWS) + i_part
        tl.store(p_part + tl.program_id(1) * tiles * (BLOCK * X_ROWS), acc)
        tl.debug_barrier()  # one thread draws the ticket for all threads' writes
        if tl.atomic_add(p_ticket + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            squares = load_squares(p_squares, parts, M, PARTS, X_ROWS)
            total = tl.zeros((BLOCK, X_ROWS), tl.float32)
            for part in range(tl.num_programs(1)):
                total += tl.load(p_part + part * tiles * (BLOCK * X_ROWS), cache_modifier=".cg")
            write_output(
                total, squares, p_bias, p_residual, p_gain, p_scaled, p_parts, p_o,
                eps, tile, tiles, N, K, M, BLOCK, PARTS, ACTIVATION,
            )  # fmt: skip
            tl.store(p_ticket + tile, 0)


@triton.jit
def write_output(
    acc,
    squares,
    p_bias,
    p_residual,
    p_gain,
    p_scaled,
    p_parts,
    p_o,
    eps,
    tile,
    tiles,
    N,
    K,
    M,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Write o, and with p_gain, the weight [N] float32 of the norm that follows, also o * weight [M, N], and each
    row's sum of squares in this tile, [M, tiles].
    """
    X_ROWS: tl.constexpr = acc.shape[1]
    i_m = tl.arange(0, X_ROWS)
    if PARTS:
        acc *= tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    if p_bias is not None:
        acc += tl.load(p_bias + tile_row_ids(tile, N, BLOCK, ACTIVATION != "")).to(tl.float32)[:, None]
    WIDE: tl.constexpr = BLOCK if ACTIVATION == "" else BLOCK // 2
    columns = N
    if ACTIVATION != "":
        columns = N // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, WIDE, X_ROWS)), (1, 2, 0)))
        acc = apply_gate(gate, up, ACTIVATION)
    i_n = tile * WIDE + tl.arange(0, WIDE)
    m_o = (i_n < columns)[:, None] & (i_m < M)[None, :]
    i_o = i_m[None, :] * columns + i_n[:, None]
    if p_residual is not None:
        acc += tl.load(p_residual + i_o, mask=m_o, other=0.0).to(tl.float32)
    if p_gain is None:
        tl.store(p_o + i_o, acc.to(p_o.dtype.element_ty), mask=m_o)
    else:
        y = round_to_dtype(acc, p_o.dtype.element_ty)
        tl.store(p_o + i_o, y, mask=m_o)
        y = tl.where(m_o, y.to(tl.float32), 0.0)
        gain = tl.load(p_gain + i_n, mask=i_n < columns, other=0.0)
        tl.store(p_scaled + i_o, round_to_dtype(y * gain[:, None], p_scaled.dtype.element_ty), mask=m_o)
        # Not y * y, which each thread could fuse with another term of its sum. Not tl.sum, whose order depends on
        # how threads share y, and so on the number of rows that x is padded to.
        own = sum_in_pairs(tl.trans(tl.fma(y, y, tl.zeros_like(y))))
        tl.store(p_parts + i_m[:, None] * tiles + tile, own, mask=(i_m < M)[:, None])

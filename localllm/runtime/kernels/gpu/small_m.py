"""Parts of products with few rows of x (M = 1 to 16), for any weight format.

y[m, n] = sum over k of W[n, k] x[m, k]: W provides the rows that tensor cores need many of, and x, transposed and
padded to 8 or 16 columns, the dimension that is small. So one program serves M = 1 to 16 in the same time, that of
reading W, and a row's result depends neither on M nor on the other rows: tensor cores multiply 8 columns at once,
each in the same order.

A program processes BLOCK rows of W and a part of their columns, so that all multiprocessors have loads in flight.
If the columns are split, each program writes its sums (float32) to a workspace and draws a ticket; the one that
draws the last ticket adds all parts in order, and finishes. Which program that is does not affect the result.

Before it waits for x, a program prefetches the weights that it reads first into L2, and while it computes, those
that it reads later: so more bytes are on their way from memory than registers or shared memory could receive.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (Triton code is written in Python syntax but typed differently)

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.activations import apply_gate
from localllm.runtime.kernels.gpu.launch import PTX, Gpu
from localllm.runtime.kernels.gpu.tiles import TileGrid

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
    """Return the number of rows that so many rows of x are padded to."""
    return TENSOR_CORE_COLUMNS if rows <= TENSOR_CORE_COLUMNS and not gpu.amd_arch else MAX_ROWS


def split_workspace(
    grid: TileGrid, block: int, x_rows: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the workspace for partial sums, and the tickets."""
    if grid.splits == 1:
        return None, None
    assert grid.tiles <= MAX_TICKETS
    return torch.empty(grid.splits * grid.tiles * block * x_rows, device=device), ticket_counters(device)


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
def reduce_splits(
    acc,
    p_bias,
    p_residual,
    p_o,
    p_partial,
    p_ticket,
    tile,
    tiles,
    N,
    M,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add up a program's sums acc [BLOCK, rows of x] float32; write o [M, N], or [M, N / 2] with an activation."""
    X_ROWS: tl.constexpr = acc.shape[1]
    if not CUT:
        write_output(acc, p_bias, p_residual, p_o, tile, N, M, BLOCK, ACTIVATION)
    else:
        i_part = tl.arange(0, BLOCK)[:, None] * X_ROWS + tl.arange(0, X_ROWS)[None, :]
        p_part = p_partial + tile * (BLOCK * X_ROWS) + i_part
        tl.store(p_part + tl.program_id(1) * tiles * (BLOCK * X_ROWS), acc)
        tl.debug_barrier()  # one thread draws the ticket for all threads' writes
        if tl.atomic_add(p_ticket + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            total = tl.zeros((BLOCK, X_ROWS), tl.float32)
            for part in range(tl.num_programs(1)):
                total += tl.load(p_part + part * tiles * (BLOCK * X_ROWS), cache_modifier=".cg")
            write_output(total, p_bias, p_residual, p_o, tile, N, M, BLOCK, ACTIVATION)
            tl.store(p_ticket + tile, 0)


@triton.jit
def write_output(acc, p_bias, p_residual, p_o, tile, N, M, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    X_ROWS: tl.constexpr = acc.shape[1]
    i_m = tl.arange(0, X_ROWS)
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
    tl.store(p_o + i_o, acc.to(p_o.dtype.element_ty), mask=m_o)

"""Products of few rows with INT4 and INT8 in the packed GPU layout."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (Triton code is written in Python syntax but typed differently)

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.formats.planes import planes_per_scale
from localllm.quant.packing import PLANES_PER_WORD
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor
from localllm.runtime.kernels.gpu.codes import byte_to_float, code_offset, decode_plane
from localllm.runtime.kernels.gpu.launch import allow_next_kernel, dot, gpu_of, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.meta import meta_packed_weight, meta_tensor
from localllm.runtime.kernels.gpu.small_m import (
    PADDED_X_ROWS,
    prefetch_l2,
    reduce_splits,
    split_workspace,
    tile_row_ids,
)
from localllm.runtime.kernels.gpu.tiles import Tile, tile_for, tile_grid

PREFETCH_CHUNKS = tl.constexpr(4)  # chunks that are prefetched before waiting for x


@triton.jit(do_not_specialize=["M", "chunks", "share", "tiles"])
def small_m_packed_kernel(
    p_x,
    p_q,
    p_scale,
    p_zero,
    p_minimum,
    p_block_scale,
    p_block_minimum,
    p_bias,
    p_residual,
    p_o,
    p_partial,
    p_ticket,
    M,
    N,
    K,
    ROWS,
    chunks,
    share,
    tiles,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    SUPER: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x [M, K], M <= 16, with parts as in quant/formats/planes.py, their rows padded to ROWS.

    Each split of a tile processes `share` chunks. GROUP: columns of a scale, 0: all; SHARED: planes of a chunk
    that share one; SUPER: columns of a block_scale.
    """
    X: tl.constexpr = p_x.dtype.element_ty
    OF: tl.constexpr = 16 // BITS  # planes
    ZERO: tl.constexpr = p_zero is not None
    tile = tl.program_id(0)
    i_n = tile_row_ids(tile, N, BLOCK, ACTIVATION != "")
    i_w = tl.arange(0, WORDS)
    i_m = tl.arange(0, PADDED_X_ROWS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, chunks)
    p_row = p_q + (i_n // 16).to(tl.int64) * (chunks * 16 * WORDS) + (i_n % 16) * WORDS
    p_words = p_row[:, None] + i_w[None, :]
    p_columns = p_x + i_m[None, :] * K + i_w[:, None]
    m_x = (i_m < M)[None, :]

    # Lines of 128 bytes: each row has WORDS / 64 lines of words per chunk, and each group a few lines of scales.
    for ahead in tl.static_range(PREFETCH_CHUNKS):
        prefetch_l2(p_row + tl.minimum(first + ahead, chunks - 1) * (16 * WORDS))
    if GROUP:
        i_g = tl.minimum(first * (WORDS * OF) // GROUP + tl.arange(0, 64), (chunks * WORDS * OF - 1) // GROUP)
        p_line = p_scale + i_g.to(tl.int64) * ROWS
        if ACTIVATION == "":
            prefetch_l2(p_line + tile * BLOCK)
        else:
            prefetch_l2(p_line + tile * (BLOCK // 2))
            prefetch_l2(p_line + N // 2 + tile * (BLOCK // 2))

    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    acc = tl.zeros((BLOCK, PADDED_X_ROWS), tl.float32)
    part, scale = acc, tl.zeros((BLOCK,), tl.float32)
    if p_zero is not None and not GROUP:
        added = code_offset(byte_to_float(tl.load(p_zero + i_n)), BITS, X)[:, None]
    else:
        added = code_offset(tl.full((BLOCK, 1), 8 if BITS == 4 and p_minimum is None else 0, tl.float32), BITS, X)
    for chunk in range(first, last):
        q = tl.load(p_words + chunk * (16 * WORDS), eviction_policy="evict_first")
        for plane in tl.static_range(OF):
            k = (chunk * OF + plane) * WORDS
            m_k = m_x if WHOLE_CHUNKS else m_x & (k + i_w < K)[:, None]
            x = tl.load(p_columns + k, mask=m_k, other=0.0)
            if not GROUP:
                acc = dot(decode_plane(q, added, plane, BITS, ZERO, X), x, acc)
            else:
                i_group = (k // GROUP).to(tl.int64) * ROWS + i_n
                i_block = (k // SUPER) * ROWS + i_n
                if plane % SHARED == 0:  # a group begins
                    scale = load_scale(p_scale, p_block_scale, i_group, i_block)
                    part = tl.zeros((BLOCK, PADDED_X_ROWS), tl.float32)
                    if p_zero is not None:
                        added = code_offset(byte_to_float(tl.load(p_zero + i_group)), BITS, X)[:, None]
                part = dot(decode_plane(q, added, plane, BITS, ZERO, X), x, part)
                if p_minimum is not None:
                    minimum = load_scale(p_minimum, p_block_minimum, i_group, i_block)
                    acc -= minimum[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
                if plane % SHARED == SHARED - 1:
                    acc += part * scale[:, None]
    if not GROUP:
        acc *= tl.load(p_scale + i_n).to(tl.float32)[:, None]
    reduce_splits(acc, p_bias, p_residual, p_o, p_partial, p_ticket, tile, tiles, N, M, BLOCK, CUT, ACTIVATION)


@triton.jit
def load_scale(p, p_block, i, i_block):
    """Return a scale or minimum in float32: as stored, or multiplied by its block's."""
    if p_block is None:
        return tl.load(p + i).to(tl.float32)
    else:
        return byte_to_float(tl.load(p + i)) * tl.load(p_block + i_block).to(tl.float32)


def packed_matmul(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply.

    x: [M, in], M <= 16 -> [M, out], or [M, out / 2] with an activation. tile: None selects the best
    """
    parts, (rows, columns) = weight.parts, weight.shape
    if COLUMN_ORDER in parts:
        x = x[:, parts[COLUMN_ORDER]]
    x = x.contiguous()
    _, chunks, _, words = parts["q"].shape
    planes = PLANES_PER_WORD[weight.format]
    code_dtype = "float32" if x.dtype == torch.float32 else f"int{16 // planes}"
    tile = tile or tile_for(gpu_of(x.device), code_dtype, rows, columns, chunks)
    grid = tile_grid(tile, rows, chunks)
    partial, ticket = split_workspace(grid, tile.block_rows, x.device)
    y = torch.empty(len(x), rows // 2 if activation else rows, dtype=x.dtype, device=x.device)
    block_scale = parts.get("block_scale")
    launch_kernel(
        small_m_packed_kernel,
        (grid.tiles, grid.splits),
        tile.warps,
        tile.stages,
        device=x.device,
        p_x=x,
        p_q=parts["q"],
        p_scale=parts["scale"],
        p_zero=parts.get("zero"),
        p_minimum=parts.get("minimum"),
        p_block_scale=block_scale,
        p_block_minimum=parts.get("block_minimum"),
        p_bias=bias,
        p_residual=None if residual is None else residual.contiguous(),
        p_o=y,
        p_partial=partial,
        p_ticket=ticket,
        M=len(x),
        N=rows,
        K=columns,
        ROWS=parts["scale"].shape[1],
        chunks=chunks,
        share=grid.chunks_per_split,
        tiles=grid.tiles,
        BLOCK=tile.block_rows,
        CUT=grid.splits > 1,
        BITS=16 // planes,
        WORDS=words,
        GROUP=weight.group or 0,
        SHARED=planes_per_scale(weight),
        SUPER=1 if block_scale is None else columns // len(block_scale),
        WHOLE_CHUNKS=columns % (words * planes) == 0,
        ACTIVATION=activation or "",
    )
    return y


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    x, x_down = meta_tensor(1, 4096), meta_tensor(16, 14336)
    yield (
        "INT4 g128, 28672 x 4096, gated",
        lambda: packed_matmul(x, meta_packed_weight("int4", 28672, 4096, 128), activation="silu"),
    )
    yield (
        "INT4 g64, 4096 x 14336, M 16",
        lambda: packed_matmul(x_down, meta_packed_weight("int4", 4096, 14336, 64)),
    )
    yield "INT4 g32, 6144 x 4096", lambda: packed_matmul(x, meta_packed_weight("int4", 6144, 4096, 32))
    yield (
        "INT8 a row, 4096 x 14336",
        lambda: packed_matmul(x_down, meta_packed_weight("int8", 4096, 14336, None), residual=x_down[:, :4096]),
    )

"""Products of few rows with INT4 and INT8 in the packed GPU layout."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (Triton code is written in Python syntax but typed differently)
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.formats.gpu_packed import planes_per_scale
from localllm.quant.packing import PLANES_PER_WORD
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor
from localllm.runtime.kernels.gpu.chunks import accumulate_planes, first_offset, load_float
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_of,
    launch_kernel,
    meta_packed_weight,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.small_m import (
    norm_arguments,
    padded_rows,
    prefetch_l2,
    reduce_splits,
    split_workspace,
    tile_row_ids,
)
from localllm.runtime.kernels.gpu.tiles import Tile, tile_for, tile_grid
from localllm.runtime.kernels.norm import FollowingNorm, Norm, PreparedNorm

PREFETCH_WORDS = tl.constexpr(256)  # of a row, 512 bytes, that are prefetched ahead of what a program reads


@triton.jit(do_not_specialize=["parts", "M", "chunks", "share", "tiles"])
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
    ROWS,
    chunks,
    share,
    tiles,
    BLOCK: tl.constexpr,
    X_ROWS: tl.constexpr,
    CUT: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    SUPER: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x [M, K], M <= X_ROWS, with parts as in quant/formats/gpu_packed.py, their rows padded to ROWS.

    Each split of a tile processes `share` chunks. GROUP: columns of a scale, 0: all; SHARED: planes of a chunk
    that share one; SUPER: columns of a block_scale.
    """
    OF: tl.constexpr = 16 // BITS  # planes
    KIND: tl.constexpr = "int4" if BITS == 4 else "int8"
    tile = tl.program_id(0)
    i_n = tile_row_ids(tile, N, BLOCK, ACTIVATION != "")
    i_w = tl.arange(0, WORDS)
    i_m = tl.arange(0, X_ROWS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, chunks)
    p_row = p_q + (i_n >> 4).to(tl.int64) * (chunks * 16 * WORDS) + (i_n & 15) * WORDS
    p_columns = p_x + i_m[None, :] * K + i_w[:, None]
    m_x = (i_m < M)[None, :]

    # Lines of 128 bytes: each row has WORDS / 64 lines of words per chunk, and each group a few lines of scales.
    AHEAD: tl.constexpr = PREFETCH_WORDS // WORDS
    for ahead in tl.static_range(AHEAD):
        prefetch_l2(p_row + tl.minimum(first + ahead, last - 1) * (16 * WORDS))
    if GROUP:
        i_g = tl.minimum(first * (WORDS * OF) // GROUP + tl.arange(0, 64), (chunks * WORDS * OF - 1) // GROUP)
        p_line = p_scale + i_g.to(tl.int64) * ROWS
        if ACTIVATION == "":
            prefetch_l2(p_line + tile * BLOCK)
        else:
            prefetch_l2(p_line + tile * (BLOCK // 2))
            prefetch_l2(p_line + N // 2 + tile * (BLOCK // 2))

    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK, X_ROWS), tl.float32)
    added = first_offset(p_zero, p_minimum, i_n, KIND, GROUP, p_x.dtype.element_ty)
    p_words = p_row[:, None] + i_w[None, :]
    for chunk in range(first, last):
        prefetch_l2(p_row + tl.minimum(chunk + AHEAD, last - 1) * (16 * WORDS))
        acc = accumulate_planes(
            acc, p_words, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, ROWS, i_n, added, chunk,
            p_columns, m_x, K, KIND, WORDS, GROUP, SUPER, SHARED, WHOLE_CHUNKS,
        )  # fmt: skip
    if not GROUP:
        acc *= load_float(p_scale + i_n)[:, None]
    allow_next_kernel(PDL)
    reduce_splits(
        acc, p_bias, p_residual, p_squares, p_gain, p_scaled, p_parts, p_o, p_partial, p_ticket,
        eps, parts, tile, tiles, N, K, M, BLOCK, CUT, PARTS, ACTIVATION,
    )  # fmt: skip


def packed_matmul(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    norm: PreparedNorm | None = None,
    following: FollowingNorm | None = None,
    tile: Tile | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply.

    x: [M, in], M <= 16 -> [M, out], or [M, out / 2] with an activation. tile: None selects the best; dtype: of the
    result, None for that of x
    """
    parts, (rows, columns) = weight.parts, weight.shape
    if COLUMN_ORDER in parts:
        x = x[:, parts[COLUMN_ORDER]]
    x = x.contiguous()
    _, chunks, _, words = parts["q"].shape
    planes = PLANES_PER_WORD[weight.format]
    code_dtype = "float32" if x.dtype == torch.float32 else f"int{16 // planes}"
    gpu = gpu_of(x.device)
    tile = tile or tile_for(gpu, code_dtype, rows, columns, chunks)
    grid = tile_grid(tile, rows, chunks)
    x_rows = padded_rows(len(x), gpu)
    partial, ticket = split_workspace(grid, tile.block_rows, x_rows, x.device)
    y = torch.empty(len(x), rows // 2 if activation else rows, dtype=dtype or x.dtype, device=x.device)
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
        **norm_arguments(y, grid.tiles, norm, following),
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
        X_ROWS=x_rows,
        CUT=grid.splits > 1,
        BITS=16 // planes,
        WORDS=words,
        GROUP=weight.group or (chunks * words * planes if "minimum" in parts else 0),
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
    norm = Norm(meta_tensor(4096, dtype=torch.float32), 1e-5)
    squares = meta_tensor(1, 64, dtype=torch.float32)
    prepared = PreparedNorm(norm.weight, norm.eps, x=x, scaled=x, squares=squares)
    yield (
        "INT4 g128, 28672 x 4096, gated, of a prepared norm",
        lambda: packed_matmul(x, meta_packed_weight("int4", 28672, 4096, 128), activation="silu", norm=prepared),
    )
    yield (
        "INT4 g128, 4096 x 14336, a norm prepared",
        lambda: packed_matmul(
            x_down[:1], meta_packed_weight("int4", 4096, 14336, 128), residual=x, following=FollowingNorm(norm)
        ),
    )

"""Products of few rows with INT4 and INT8 in the packed GPU layout."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (Triton code is written in Python syntax but typed differently)

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
from localllm.runtime.kernels.gpu.launch import (
    INTERPRETED,
    PTX,
    allow_next_kernel,
    dot,
    gpu_of,
    launch_kernel,
    meta_packed_weight,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.small_m import (
    PADDED_X_ROWS,
    norm_arguments,
    prefetch_l2,
    reduce_splits,
    split_workspace,
    tile_row_ids,
)
from localllm.runtime.kernels.gpu.tiles import Tile, tile_for, tile_grid
from localllm.runtime.kernels.norm import FollowingNorm, Norm, PreparedNorm

# Decodes packed codes (quant/formats/gpu_packed.py) to inputs of tensor cores without integer conversions.
#
# A multiprocessor has the fewest lanes for conversions. A float whose last mantissa bit stands for 1 is made of a
# code by setting the exponent's bits: in bfloat16, 0x4300 | q is 128 + q for q below 128; in float16, 0x6400 | q
# is 1024 + q for q below 1024. One LOP3 does it for two codes, each in one half of a register, and one fma of
# halves subtracts the offset and the zero point: exactly, as integers up to 256 are representable in bfloat16,
# and up to 2048 in float16.
#
# A signed byte b has one bit more than the mantissa of bfloat16; its highest bit falls on the lowest of the
# exponent: (0x4300 | b & 127) - (0x4300 | b & 128) is 128 + (b & 127) less 128 or 256, which is b.
#
# Two 4-bit codes cost a shift (except for plane 0), a LOP3 and an HFMA2; two 8-bit codes one more LOP3 in
# bfloat16. Without assembly, as in the interpreter and for float32, the same values are computed one by one.

INT4_BIAS, INT4_HALF_BIAS, INT8_HALF_BIAS = tl.constexpr(128), tl.constexpr(1024), tl.constexpr(1152)


def _int4(plane: int, kind: str, one: str, magic: str) -> str:
    """PTX: $0 = the floats of two words $1, plus $2"""
    return (
        f"{{ .reg .b32 t; shr.u32 t, $1, {4 * plane}; lop3.b32 t, t, 0x000F000F, {magic}, 0xEA;"
        f" .reg .b32 one; mov.b32 one, {one}; fma.rn.{kind} $0, t, one, $2; }}"
    )


def _int8(plane: int) -> str:
    """PTX: $0 = the floats of two words $1, plus $2, in bfloat16"""
    return (
        f"{{ .reg .b32 t, c, one; mov.b32 one, 0x3F803F80; shr.u32 t, $1, {8 * plane};"
        " lop3.b32 c, t, 0x00800080, 0xC300C300, 0xEA; lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;"
        " fma.rn.bf16x2 $0, t, one, c; }"
    )


def _int8_half(plane: int) -> str:
    """PTX: $0 = 1152 + two words $1, plus $2, in float16; an exclusive or flips the highest bit of a byte"""
    return (
        f"{{ .reg .b32 t, one; mov.b32 one, 0x3C003C00; shr.u32 t, $1, {8 * plane};"
        " lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A; fma.rn.f16x2 $0, t, one, $2; }"
    )


ADD_ASM = tl.constexpr("{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }")
INT4_ASM = tl.constexpr(tuple(_int4(plane, "bf16x2", "0x3F803F80", "0x43004300") for plane in range(4)))
INT4_HALF_ASM = tl.constexpr(tuple(_int4(plane, "f16x2", "0x3C003C00", "0x64006400") for plane in range(4)))
INT8_ASM = tl.constexpr(tuple(_int8(plane) for plane in range(2)))
INT8_HALF_ASM = tl.constexpr(tuple(_int8_half(plane) for plane in range(2)))


@triton.jit
def byte_to_float(b):
    """Convert int8 or uint8 to float32: 0x4B000000 | u is 2^23 + u"""
    if b.dtype == tl.int8:
        return ((b.to(tl.int32) & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    else:
        return (b.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def code_offset(zero, BITS: tl.constexpr, X: tl.constexpr):
    """Return the offset that `decode_plane` adds, from zero points in float32. X: dtype of x"""
    if tl.float32 == X or not PTX:
        return -zero - (INT4_BIAS if BITS == 4 else 0)
    elif tl.float16 == X:
        return (-zero - (INT4_HALF_BIAS if BITS == 4 else INT8_HALF_BIAS)).to(X)
    else:
        return (-zero - (INT4_BIAS if BITS == 4 else 0)).to(X)


@triton.jit
def decode_plane(q, added, PLANE: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, X: tl.constexpr):
    """Decode one plane of int16 words: code - zero in X, or in float32 under the interpreter.

    added: from `code_offset`, broadcastable; ZERO: whether there are zero points
    """
    if tl.float32 == X or not PTX:
        if BITS == 4:
            decoded = magic_float(q >> (4 * PLANE) & 15) + added
        else:
            decoded = (magic_float(q >> (8 * PLANE) & 127) - magic_float(q >> (8 * PLANE) & 128)) + added
        if not INTERPRETED:
            decoded = decoded.to(X)
    elif tl.float16 == X:
        HALF: tl.constexpr = INT4_HALF_ASM[PLANE] if BITS == 4 else INT8_HALF_ASM[PLANE]
        decoded = tl.inline_asm_elementwise(HALF, "=r,r,r", [q, added], dtype=tl.float16, is_pure=True, pack=2)
    elif BITS == 4:
        FOUR: tl.constexpr = INT4_ASM[PLANE]
        decoded = tl.inline_asm_elementwise(FOUR, "=r,r,r", [q, added], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        EIGHT: tl.constexpr = INT8_ASM[PLANE]
        decoded = tl.inline_asm_elementwise(EIGHT, "=r,r", [q], dtype=tl.bfloat16, is_pure=True, pack=2)
        if ZERO:
            decoded = tl.inline_asm_elementwise(
                ADD_ASM, "=r,r,r", [decoded, added], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    return decoded


@triton.jit
def magic_float(low):
    """Convert int16 to float32: 128 + low, or 256 for 128"""
    return (low | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)


PREFETCH_CHUNKS = tl.constexpr(4)  # chunks that are prefetched before waiting for x


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
    """Multiply x [M, K], M <= 16, with parts as in quant/formats/gpu_packed.py, their rows padded to ROWS.

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
    reduce_splits(
        acc, p_bias, p_residual, p_squares, p_gain, p_scaled, p_parts, p_o, p_partial, p_ticket,
        eps, parts, tile, tiles, N, K, M, BLOCK, CUT, PARTS, ACTIVATION,
    )  # fmt: skip


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
    tile = tile or tile_for(gpu_of(x.device), code_dtype, rows, columns, chunks)
    grid = tile_grid(tile, rows, chunks)
    partial, ticket = split_workspace(grid, tile.block_rows, x.device)
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

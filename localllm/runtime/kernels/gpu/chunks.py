"""Parts of the products of many rows with packed weights: a chunk of columns is unpacked plane by plane.

Each plane is multiplied with its columns of x. Codes become floats without an integer conversion: they are shifted
to where they are the mantissa of a float of known exponent (integer codes), or its exponent and mantissa (floats
of 4 and 8 bits, whose zero and subnormals are at the same place in a float32). Layout:
`quant/formats/gpu_packed.py`; a dense matrix is treated as chunks of one plane.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from math import gcd
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from localllm.quant.packing import INT4_GPU_PACKED
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.gpu.launch import dot, gpu_of

DENSE_CHUNK_COLUMNS = 64  # of a chunk of a dense matrix
PLANES_PER_WORD = {"plain": 1, "int4": 4, "e2m1": 4, "int8": 2, "e4m3": 2}
CODE_TYPES = {INT4_GPU_PACKED: "int4", "int8_planes": "int8", "mxfp4_planes": "e2m1", "fp8_planes": "e4m3"}
MAX_STAGES = {64: 3, 32: 4, 16: 6}  # by W: about 8 KB of weights
STAGE_BYTES, SMALL_STAGE_BYTES = 144 * 2**10, 80 * 2**10  # of shared memory per block, for loads in flight
SCALE_PARTS = ("scale", "zero", "minimum", "block_scale", "block_minimum")


def weight_arguments(weight: Tensor | QuantizedTensor) -> dict[str, Any]:
    """Return the arguments that describe a weight to a kernel that multiplies or unpacks it."""
    if isinstance(weight, Tensor):
        chunks = triton.cdiv(weight.shape[1], DENSE_CHUNK_COLUMNS)
        scales = dict.fromkeys(f"p_{name}" for name in SCALE_PARTS)
        shape = {"KIND": "plain", "W": DENSE_CHUNK_COLUMNS, "GROUP": 0, "BLOCK": 0, "SHARE": 1}
        return {"p_q": weight, **scales, "stored": weight.shape[0], "chunks": chunks, **shape}
    code_type, q = CODE_TYPES[weight.format], weight.parts["q"]
    tiles, chunks, rows_per_tile, words = q.shape
    group, planes = weight.group or 0, PLANES_PER_WORD[code_type]
    block = weight.parts.get("block_scale")
    return {
        "p_q": q,
        **{f"p_{name}": weight.parts.get(name) for name in SCALE_PARTS},
        "stored": tiles * rows_per_tile,
        "chunks": chunks,
        "KIND": code_type,
        "W": words,
        "GROUP": group,
        "BLOCK": 0 if block is None else chunks * words * planes // block.shape[0],
        "SHARE": gcd(group // words, planes) if group else planes,
    }


def scale_applies_last(weight: Tensor | QuantizedTensor) -> bool:
    """Return whether one scale per row suffices, so that it can be applied to the row's sum."""
    if isinstance(weight, Tensor) or weight.group or "minimum" in weight.parts:
        return False
    return CODE_TYPES[weight.format] != "e2m1"


def pipeline_stages(arguments: dict[str, Any], rows: int, rows_of_x: int, x: Tensor) -> int:
    """Return the number of chunks in flight that fit in shared memory."""
    column_bytes = (
        rows_of_x * x.element_size() + rows * arguments["p_q"].element_size() // PLANES_PER_WORD[arguments["KIND"]]
    )
    chunk_bytes = column_bytes * PLANES_PER_WORD[arguments["KIND"]] * arguments["W"]
    stage_bytes = SMALL_STAGE_BYTES if gpu_of(x.device).small_shared else STAGE_BYTES
    return max(1, min(MAX_STAGES[arguments["W"]], stage_bytes // chunk_bytes))


@triton.jit
def decode_e8m0(exponent):
    """2^(exponent - 127), where exponent 0 is a subnormal"""
    bits = exponent.to(tl.int32)
    return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_codes(words, PLANE: tl.constexpr, KIND: tl.constexpr):
    """Decode one plane of int32 words to float32; INT4 codes are 0 to 15."""
    if KIND == "int4":
        bits = ((words << (16 - 4 * PLANE)) & 0x000F0000) | 0x43000000  # 128 + code
        return bits.to(tl.float32, bitcast=True) - 128.0
    elif KIND == "int8":
        bits = (((words >> (8 * PLANE)) & 0xFF) ^ 0x80) | 0x4B000000  # 2^23 + 128 + code
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    elif KIND == "e2m1":
        code = words >> (4 * PLANE)
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    else:
        code = words >> (8 * PLANE)
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def load_group_scale(
    p_number, p_block, column, b_row, m_row, stored, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the scale or minimum of a column's group, [rows] float32."""
    group = column // GROUP if GROUP else 0
    stored_scale = tl.load(p_number + group * stored + b_row, mask=m_row, other=0)
    if KIND == "e2m1":
        return decode_e8m0(stored_scale)
    number = stored_scale.to(tl.float32)
    if p_block is not None:
        number *= tl.load(p_block + column // BLOCK * stored + b_row, mask=m_row, other=0).to(tl.float32)
    return number


@triton.jit
def load_words(p_q, b_row, m_row, chunk, chunks, W: tl.constexpr):
    """Load the words of a chunk, [rows, W] int32."""
    at = ((b_row // 16) * chunks + chunk) * (16 * W) + (b_row % 16) * W
    words = tl.load(p_q + at[:, None] + tl.arange(0, W)[None, :], mask=m_row[:, None], other=0)
    return words.to(tl.int32)


@triton.jit
def dequantize_plane(
    words,
    PLANE: tl.constexpr,
    chunk,
    p_scale,
    p_zero,
    p_minimum,
    p_block_scale,
    p_block_minimum,
    stored,
    b_row,
    m_row,
    KIND: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Decode one plane of a chunk's words to float32 [rows, W], with or without scales.

    Planes that share scales load them from one address, which the compiler recognizes and does once.
    """
    PLANES: tl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    w = decode_codes(words, PLANE, KIND)
    column = (chunk * PLANES + PLANE // SHARE * SHARE) * W
    if p_zero is not None:
        zero = tl.load(p_zero + (column // GROUP if GROUP else 0) * stored + b_row, mask=m_row, other=0)
        w -= zero.to(tl.float32)[:, None]
    elif KIND == "int4" and p_minimum is None:
        w -= 8.0
    if SCALED:
        w *= load_group_scale(p_scale, p_block_scale, column, b_row, m_row, stored, KIND, GROUP, BLOCK)[:, None]
    if p_minimum is not None:
        w -= load_group_scale(p_minimum, p_block_minimum, column, b_row, m_row, stored, KIND, GROUP, BLOCK)[
            :, None
        ]
    return w


@triton.jit
def accumulate_chunk(
    acc,
    p_q,
    p_scale,
    p_zero,
    p_minimum,
    p_block_scale,
    p_block_minimum,
    stored,
    chunks,
    b_row,
    m_row,
    chunk,
    p_x,
    m_x,
    K,
    KIND: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    LAST: tl.constexpr,
):
    """Return acc + W x^T over the columns of a chunk.

    acc: [rows, columns of x^T] float32; b_row: int64, of the stored rows; p_x: pointers to the rows of x
    """
    X: tl.constexpr = p_x.dtype.element_ty
    b_word = tl.arange(0, W)
    if KIND == "plain":
        column = chunk * W + b_word
        m_w = m_row[:, None] & (column < K)[None, :]
        w = tl.load(p_q + b_row[:, None] * K + column[None, :], mask=m_w, other=0)
        x = tl.load(p_x[None, :] + column[:, None], mask=m_x[None, :] & (column < K)[:, None], other=0)
        acc = dot(w.to(X), x, acc)
    else:
        words = load_words(p_q, b_row, m_row, chunk, chunks, W)
        for plane in tl.static_range(4 if KIND == "int4" or KIND == "e2m1" else 2):
            w = dequantize_plane(
                words, plane, chunk, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored, b_row,
                m_row, KIND, W, GROUP, BLOCK, SHARE, not LAST,
            )  # fmt: skip
            column = (chunk * (4 if KIND == "int4" or KIND == "e2m1" else 2) + plane) * W + b_word
            x = tl.load(p_x[None, :] + column[:, None], mask=m_x[None, :] & (column < K)[:, None], other=0)
            acc = dot(w.to(X), x, acc)
    return acc


@triton.jit
def apply_row_scale(acc, p_scale, b_row, m_row, LAST: tl.constexpr):
    """Apply the scale that `accumulate_chunk` left to the end."""
    if LAST:
        acc *= tl.load(p_scale + b_row, mask=m_row, other=0).to(tl.float32)[:, None]
    return acc

"""Parts of products with packed weights: a chunk of columns is unpacked plane by plane.

Each plane is multiplied with its columns of x. Codes become floats without an integer conversion: they are shifted
to where they are the mantissa of a float of known exponent (integer codes), or its exponent and mantissa (floats
of 4 and 8 bits, whose zero and subnormals are at the same place in a wider float). Layout:
`quant/formats/gpu_packed.py`; a dense matrix is treated as chunks of one plane.

With few rows of x, reading weights leaves time for few instructions: `accumulate_planes` decodes two codes at
once with assembly, and applies scales to the sums over the columns that share them. With many, `accumulate_chunk`
applies them to the weights, which are fewer than the sums.
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
from localllm.runtime.kernels.gpu.launch import INTERPRETED, PTX, dot, gpu_of

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
        "GROUP": group if scale_applies_last(weight) else group or chunks * words * planes,
        "BLOCK": 0 if block is None else chunks * words * planes // block.shape[0],
        "SHARE": gcd(group // words, planes) if group else planes,
    }


def scale_applies_last(weight: Tensor | QuantizedTensor) -> bool:
    """Return whether one scale per row suffices, so that it can be applied to the row's sum."""
    if isinstance(weight, Tensor) or weight.group or "minimum" in weight.parts:
        return False
    return CODE_TYPES[weight.format] != "e2m1"


def pipeline_stages(arguments: dict[str, Any], rows: int, rows_of_x: int, x: Tensor, unrolled: int = 1) -> int:
    """Return the number of trips of the loop in flight, of `unrolled` chunks each, that fit in shared memory."""
    column_bytes = (
        rows_of_x * x.element_size() + rows * arguments["p_q"].element_size() // PLANES_PER_WORD[arguments["KIND"]]
    )
    chunk_bytes = column_bytes * PLANES_PER_WORD[arguments["KIND"]] * arguments["W"]
    stage_bytes = SMALL_STAGE_BYTES if gpu_of(x.device).small_shared else STAGE_BYTES
    stages = MAX_STAGES[triton.next_power_of_2(arguments["W"] * unrolled)]
    return max(1, min(stages, stage_bytes // (chunk_bytes * unrolled)))


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


def _float(bits: int, mantissa: int, plane: int, *, half: bool) -> str:
    """PTX: $0 = the floats of two words $1, in float16 (half) or bfloat16. Their zeros and subnormals are those of
    the wider format, whose exponents are larger by a constant.
    """
    kind, exponents, fraction = ("f16x2", 15, 10) if half else ("bf16x2", 127, 7)
    bias = 2 ** (bits - mantissa - 2) - 1
    factor = (2 * exponents - bias) << fraction
    place, at = fraction - mantissa, bits * plane
    shift = f"shl.b32 m, $1, {place - at}" if place >= at else f"shr.u32 m, $1, {at - place}"
    mask = (2 ** (bits - 1) - 1) << place
    return (
        f"{{ .reg .b32 s, m, f, z; shl.b32 s, $1, {16 - bits - at}; {shift}; and.b32 m, m, {mask * 0x10001:#x};"
        f" lop3.b32 m, s, 0x80008000, m, 0xEA; mov.b32 f, {factor * 0x10001:#x}; mov.b32 z, 0x80008000;"
        f" fma.rn.{kind} $0, m, f, z; }}"
    )


def _multiply(kind: str) -> str:
    """PTX: $0 = two products of $1 and $2; less 0, as sm_80 has no product of bfloat16"""
    return f"{{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.{kind} $0, $1, $2, z; }}"


MULTIPLY_ASM, MULTIPLY_HALF_ASM = tl.constexpr(_multiply("bf16x2")), tl.constexpr(_multiply("f16x2"))
ADD_ASM = tl.constexpr("{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }")
INT4_ASM = tl.constexpr(tuple(_int4(plane, "bf16x2", "0x3F803F80", "0x43004300") for plane in range(4)))
INT4_HALF_ASM = tl.constexpr(tuple(_int4(plane, "f16x2", "0x3C003C00", "0x64006400") for plane in range(4)))
INT8_ASM = tl.constexpr(tuple(_int8(plane) for plane in range(2)))
E2M1_ASM = tl.constexpr(tuple(_float(4, 1, plane, half=False) for plane in range(4)))
E2M1_HALF_ASM = tl.constexpr(tuple(_float(4, 1, plane, half=True) for plane in range(4)))
E4M3_ASM = tl.constexpr(tuple(_float(8, 3, plane, half=False) for plane in range(2)))
E4M3_HALF_ASM = tl.constexpr(tuple(_float(8, 3, plane, half=True) for plane in range(2)))
INT8_HALF_ASM = tl.constexpr(tuple(_int8_half(plane) for plane in range(2)))


# `tl.load` has a layout of its own, from which numbers pass through shared memory to the threads that need them,
# between two barriers. A load in assembly has the layout of its result: each thread loads what it needs.
LOAD_16_BITS = tl.constexpr("ld.global.nc.b16 $0, [$1];")
LOAD_32_BITS = tl.constexpr("ld.global.nc.b32 $0, [$1];")
LOAD_INT8 = tl.constexpr("ld.global.nc.s8 $0, [$1];")
LOAD_UINT8 = tl.constexpr("ld.global.nc.u8 $0, [$1];")


@triton.jit
def load_weight_numbers(p):
    """Load what no kernel writes, such as scales, without a barrier; bytes as int32."""
    STORED: tl.constexpr = p.dtype.element_ty
    if not PTX:
        number = tl.load(p)
        if p.dtype.element_ty.primitive_bitwidth == 8:
            number = number.to(tl.int32)
    elif tl.int8 == STORED:
        number = tl.inline_asm_elementwise(
            LOAD_INT8, "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    elif tl.uint8 == STORED:
        number = tl.inline_asm_elementwise(
            LOAD_UINT8, "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    elif tl.float32 == STORED:
        number = tl.inline_asm_elementwise(
            LOAD_32_BITS, "=f,l", [p.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        number = tl.inline_asm_elementwise(
            LOAD_16_BITS, "=h,l", [p.to(tl.int64)], dtype=p.dtype.element_ty, is_pure=True, pack=1
        )
    return number


@triton.jit
def load_float(p):
    """Load numbers of a weight to float32; of int8 and uint8 as 0x4B000000 | u, which is 2^23 + u."""
    number = load_weight_numbers(p)
    if p.dtype.element_ty == tl.int8:
        return ((number & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    elif p.dtype.element_ty == tl.uint8:
        return (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        return number.to(tl.float32)


@triton.jit
def code_offset(zero, KIND: tl.constexpr, X: tl.constexpr):
    """Return the offset that `decode_plane` adds, from zero points in float32. X: dtype of x"""
    if tl.float32 == X or not PTX:
        return -zero - (INT4_BIAS if KIND == "int4" else 0)
    elif tl.float16 == X:
        return (-zero - (INT4_HALF_BIAS if KIND == "int4" else INT8_HALF_BIAS)).to(X)
    else:
        return (-zero - (INT4_BIAS if KIND == "int4" else 0)).to(X)


@triton.jit
def decode_plane(q, added, PLANE: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, X: tl.constexpr):
    """Decode one plane of int16 words: code - zero in X, or in float32 under the interpreter.

    added: from `code_offset`, broadcastable; ZERO: whether there are zero points
    """
    if tl.float32 == X or not PTX:
        if KIND == "e2m1" or KIND == "e4m3":
            decoded = decode_codes(q.to(tl.int32), PLANE, KIND)
        elif KIND == "int4":
            decoded = magic_float(q >> (4 * PLANE) & 15) + added
        else:
            decoded = (magic_float(q >> (8 * PLANE) & 127) - magic_float(q >> (8 * PLANE) & 128)) + added
        if not INTERPRETED:
            decoded = decoded.to(X)
    elif KIND == "e2m1" or KIND == "e4m3":
        if tl.float16 == X:
            HALVES: tl.constexpr = E2M1_HALF_ASM[PLANE] if KIND == "e2m1" else E4M3_HALF_ASM[PLANE]
            decoded = tl.inline_asm_elementwise(HALVES, "=r,r", [q], dtype=tl.float16, is_pure=True, pack=2)
        else:
            FLOATS: tl.constexpr = E2M1_ASM[PLANE] if KIND == "e2m1" else E4M3_ASM[PLANE]
            decoded = tl.inline_asm_elementwise(FLOATS, "=r,r", [q], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif tl.float16 == X:
        HALF: tl.constexpr = INT4_HALF_ASM[PLANE] if KIND == "int4" else INT8_HALF_ASM[PLANE]
        decoded = tl.inline_asm_elementwise(HALF, "=r,r,r", [q, added], dtype=tl.float16, is_pure=True, pack=2)
    elif KIND == "int4":
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
def load_scale(p, p_block, i, i_block, KIND: tl.constexpr):
    """Return scales or minimums in float32: as stored, or multiplied by their blocks'."""
    if KIND == "e2m1":
        number = decode_e8m0(load_weight_numbers(p + i))
    else:
        number = load_float(p + i)
        if p_block is not None:
            number *= load_float(p_block + i_block)
    return number


@triton.jit
def word_pointers(p_q, i_row, chunks, W: tl.constexpr):
    """Return pointers to the words of chunk 0 of rows, int64 [rows], as [rows, W]."""
    p_row = p_q + (i_row >> 4) * (chunks * 16 * W) + (i_row & 15) * W
    return p_row[:, None] + tl.arange(0, W)[None, :]


@triton.jit
def first_offset(p_zero, p_minimum, i_row, KIND: tl.constexpr, GROUP: tl.constexpr, X: tl.constexpr):
    """Return what `decode_plane` adds to the codes of rows, [rows, 1], where it does not depend on the group."""
    if p_zero is not None and not GROUP:
        zero = load_float(p_zero + i_row)[:, None]
    else:
        ZERO: tl.constexpr = 8 if KIND == "int4" and p_minimum is None else 0
        zero = tl.full((i_row.shape[0], 1), ZERO, tl.float32)
    return code_offset(zero, KIND, X)


@triton.jit
def column_sums(x, acc):
    """Return the sums of the columns of x, [K, columns] -> [rows of acc or 1, columns] float32."""
    if PTX and x.dtype.primitive_bitwidth == 16:  # by tensor cores, in the layout of acc and without a barrier
        sums = dot(tl.full((acc.shape[0], x.shape[0]), 1.0, x.dtype), x, tl.zeros_like(acc))
    else:
        sums = tl.sum(x.to(tl.float32), 0)[None, :]
    return sums


@triton.jit
def accumulate_planes(
    acc,
    p_words,
    p_scale,
    p_zero,
    p_minimum,
    p_block_scale,
    p_block_minimum,
    stored,
    i_row,
    added,
    chunk,
    p_columns,
    m_x,
    K,
    KIND: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
):
    """Return acc + W x^T over the columns of a chunk; without GROUP, before the scale.

    acc: [rows, columns of x^T] float32; p_words: pointers to the words of chunk 0, [rows, W]; i_row: [rows], among
    those of scales; added: from `first_offset`; p_columns: pointers to the first W columns of x, [W, columns of
    x^T]; m_x: [1, columns of x^T]; WHOLE_CHUNKS: K is whole chunks
    """
    X: tl.constexpr = p_columns.dtype.element_ty
    PLANES: tl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    COLUMNS: tl.constexpr = PLANES * W
    q = tl.load(p_words + chunk * (16 * W), eviction_policy="evict_first")
    part, scale = acc, tl.zeros((acc.shape[0],), tl.float32)
    for plane in tl.static_range(PLANES):
        k = chunk * COLUMNS + plane * W
        m_k = m_x if WHOLE_CHUNKS else m_x & (k + tl.arange(0, W) < K)[:, None]
        x = tl.load(p_columns + k, mask=m_k, other=0.0)
        if not GROUP:
            acc = dot(decode_plane(q, added, plane, KIND, p_zero is not None, X), x, acc)
        else:
            # Where chunks are whole groups, or blocks whole chunks, no division is left in the loop.
            of_chunk = chunk * (COLUMNS // GROUP) + plane * W // GROUP
            group = of_chunk if COLUMNS % GROUP == 0 else k // GROUP
            i_group = group.to(tl.int64) * stored + i_row
            i_block = i_group
            if p_block_scale is not None:
                block = chunk // (BLOCK // COLUMNS) if BLOCK % COLUMNS == 0 else k // BLOCK
                i_block = block.to(tl.int64) * stored + i_row
            if plane % SHARE == 0:  # a group begins
                scale = load_scale(p_scale, p_block_scale, i_group, i_block, KIND)
                part = tl.zeros_like(acc)
                if p_zero is not None:
                    added = code_offset(load_float(p_zero + i_group), KIND, X)[:, None]
            part = dot(decode_plane(q, added, plane, KIND, p_zero is not None, X), x, part)
            if p_minimum is not None:
                minimum = load_scale(p_minimum, p_block_minimum, i_group, i_block, KIND)
                acc -= minimum[:, None] * column_sums(x, acc)
            if plane % SHARE == SHARE - 1:
                acc += part * scale[:, None]
    return acc


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
    """Load the words of a chunk, [rows, W] int16."""
    at = ((b_row >> 4) * chunks + chunk) * (16 * W) + (b_row & 15) * W
    return tl.load(p_q + at[:, None] + tl.arange(0, W)[None, :], mask=m_row[:, None], other=0)


@triton.jit
def multiply_halves(a, b, X: tl.constexpr):
    """a * b in float16 or bfloat16, with one rounding; b broadcastable"""
    if tl.float16 == X:
        product = tl.inline_asm_elementwise(
            MULTIPLY_HALF_ASM, "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        product = tl.inline_asm_elementwise(
            MULTIPLY_ASM, "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return product


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
    X: tl.constexpr,
):
    """Decode one plane of a chunk's words to X [rows, W], with or without scales, rounding once.

    Planes that share scales load them from one address, which the compiler recognizes and does once.
    """
    PLANES: tl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    column = (chunk * PLANES + PLANE // SHARE * SHARE) * W
    # Codes are exact in 16 bits, and scales in X: an fma of halves rounds as often as float32 and a conversion.
    EXACT: tl.constexpr = p_scale.dtype.element_ty == X or (KIND == "e2m1" and tl.bfloat16 == X) or not SCALED
    IN_HALVES: tl.constexpr = PTX and (tl.bfloat16 == X or tl.float16 == X)
    if IN_HALVES and EXACT and p_minimum is None and p_block_scale is None:
        zero = tl.full(b_row.shape, 8.0 if KIND == "int4" else 0.0, tl.float32)
        if p_zero is not None:
            i_zero = (column // GROUP if GROUP else 0) * stored + b_row
            zero = tl.load(p_zero + i_zero, mask=m_row, other=0).to(tl.float32)
        w = decode_plane(words, code_offset(zero[:, None], KIND, X), PLANE, KIND, p_zero is not None, X)
        if SCALED:
            scale = load_group_scale(p_scale, None, column, b_row, m_row, stored, KIND, GROUP, BLOCK)
            w = multiply_halves(w, scale.to(X)[:, None], X)
    else:
        w = decode_codes(words.to(tl.int32), PLANE, KIND)
        if p_zero is not None:
            zero = tl.load(p_zero + (column // GROUP if GROUP else 0) * stored + b_row, mask=m_row, other=0)
            w -= zero.to(tl.float32)[:, None]
        elif KIND == "int4" and p_minimum is None:
            w -= 8.0
        if SCALED:
            w *= load_group_scale(p_scale, p_block_scale, column, b_row, m_row, stored, KIND, GROUP, BLOCK)[
                :, None
            ]
        if p_minimum is not None:
            w -= load_group_scale(p_minimum, p_block_minimum, column, b_row, m_row, stored, KIND, GROUP, BLOCK)[
                :, None
            ]
        w = w.to(X)
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
                m_row, KIND, W, GROUP, BLOCK, SHARE, not LAST, X,
            )  # fmt: skip
            column = (chunk * (4 if KIND == "int4" or KIND == "e2m1" else 2) + plane) * W + b_word
            x = tl.load(p_x[None, :] + column[:, None], mask=m_x[None, :] & (column < K)[:, None], other=0)
            acc = dot(w, x, acc)
    return acc


@triton.jit
def apply_row_scale(acc, p_scale, b_row, m_row, LAST: tl.constexpr):
    """Apply the scale that `accumulate_chunk` left to the end."""
    if LAST:
        acc *= tl.load(p_scale + b_row, mask=m_row, other=0).to(tl.float32)[:, None]
    return acc

"""Decodes packed codes (quant/formats/planes.py) to inputs of tensor cores without integer conversions.

A multiprocessor has the fewest lanes for conversions. A float whose last mantissa bit stands for 1 is made of a
code by setting the exponent's bits: in bfloat16, 0x4300 | q is 128 + q for q below 128; in float16, 0x6400 | q is
1024 + q for q below 1024. One LOP3 does it for two codes, each in one half of a register, and one fma of halves
subtracts the offset and the zero point: exactly, as integers up to 256 are representable in bfloat16, and up to
2048 in float16.

A signed byte b has one bit more than the mantissa of bfloat16; its highest bit falls on the lowest of the
exponent: (0x4300 | b & 127) - (0x4300 | b & 128) is 128 + (b & 127) less 128 or 256, which is b.

Two 4-bit codes cost a shift (except for plane 0), a LOP3 and an HFMA2; two 8-bit codes one more LOP3 in bfloat16.
Without assembly, as in the interpreter and for float32, the same values are computed one by one.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (Triton code is written in Python syntax but typed differently)

import triton
import triton.language as tl

from localllm.runtime.kernels.gpu.launch import INTERPRETED

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
    if INTERPRETED or tl.float32 == X:
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
    if INTERPRETED or tl.float32 == X:
        if BITS == 4:
            found = magic_float(q >> (4 * PLANE) & 15) + added
        else:
            found = (magic_float(q >> (8 * PLANE) & 127) - magic_float(q >> (8 * PLANE) & 128)) + added
    elif tl.float16 == X:
        HALF: tl.constexpr = INT4_HALF_ASM[PLANE] if BITS == 4 else INT8_HALF_ASM[PLANE]
        found = tl.inline_asm_elementwise(HALF, "=r,r,r", [q, added], dtype=tl.float16, is_pure=True, pack=2)
    elif BITS == 4:
        FOUR: tl.constexpr = INT4_ASM[PLANE]
        found = tl.inline_asm_elementwise(FOUR, "=r,r,r", [q, added], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        EIGHT: tl.constexpr = INT8_ASM[PLANE]
        found = tl.inline_asm_elementwise(EIGHT, "=r,r", [q], dtype=tl.bfloat16, is_pure=True, pack=2)
        if ZERO:
            found = tl.inline_asm_elementwise(
                ADD_ASM, "=r,r,r", [found, added], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    return found


@triton.jit
def magic_float(low):
    """Convert int16 to float32: 128 + low, or 256 for 128"""
    return (low | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)

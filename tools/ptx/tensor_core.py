"""Matrix operands of tensor cores: which thread holds which element, and products of matrices.

Layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", and "ldmatrix". In the following, a
warp's thread t is in group t // 4, and its number in the group is t % 4.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from tools.ptx.arithmetic import UnknownOpcodeError
from tools.ptx.rounding import Array, canonical, from_bfloat16, to_float32

THREADS = np.arange(32)
GROUP, MEMBER = THREADS // 4, THREADS % 4


def matrix_fragments(rows: Array, transposed: bool) -> Array:
    """Return the registers that ldmatrix fills, [warps, matrices, threads]. rows: [warps, matrices, 8, 8] of
    uint16

    A thread receives elements 2 m and 2 m + 1 of row g, or of column g, in the lower and upper half.
    """
    if transposed:
        rows = rows.swapaxes(-1, -2)
    low, high = (rows[..., GROUP, 2 * MEMBER + i].astype(np.uint32) for i in (0, 1))
    return low | high << np.uint32(16)


@dataclass(frozen=True)
class MmaShape:
    """An mma.sync of 16 x K and K x 8 matrices with sums in float32 or int32."""

    k: int
    type: str  # of the factors
    sums: str


@cache
def mma_shape(opcode: str) -> MmaShape:
    _, _, _, shape, *layout, d, a, b, c = opcode.split(".")
    supported = {("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "bf16"), ("m16n8k8", "f16")} | {
        ("m16n8k32", "s8"),
        ("m16n8k16", "s8"),
    }
    if layout != ["row", "col"] or a != b or c != d or (shape, a) not in supported:
        raise UnknownOpcodeError(f"the opcode {opcode} has no definition")
    if d != ("s32" if a == "s8" else "f32"):
        raise UnknownOpcodeError(f"the opcode {opcode} has no definition")
    return MmaShape(int(shape.rpartition("k")[2]), a, d)


@cache
def positions(k: int, per_register: int) -> tuple[Array, Array, Array, Array]:
    """Return rows and columns of the elements of a [threads, registers, elements], then rows and columns of b."""
    half = 4 * per_register  # columns of a that one register of all threads covers
    element = np.arange(per_register)
    a_register, b_register = np.arange(2 * k // half), np.arange(k // half)
    a_row = GROUP[:, None, None] + 8 * (a_register % 2)[None, :, None] + 0 * element
    a_column = MEMBER[:, None, None] * per_register + half * (a_register // 2)[None, :, None] + element
    b_row = MEMBER[:, None, None] * per_register + half * b_register[None, :, None] + element
    b_column = GROUP[:, None, None] + 0 * b_row
    return a_row, a_column, b_row, b_column


C_ROW = GROUP[:, None] + np.array([0, 0, 8, 8])
C_COLUMN = 2 * MEMBER[:, None] + np.array([0, 1, 0, 1])


def multiply(shape: MmaShape, a: Array, b: Array, c: Array) -> Array:
    """Return a @ b + c as registers. a, b, c: registers, [warps, threads, registers] of uint32

    Products of 16-bit numbers are exact. The sum of 16 of them and c is rounded toward zero, as tensor cores were
    measured to do; the manual leaves order and rounding open.
    """
    warps, per_register = len(a), 4 if shape.type == "s8" else 2
    a_row, a_column, b_row, b_column = positions(shape.k, per_register)
    left = np.empty((warps, 16, shape.k))
    right = np.empty((warps, shape.k, 8))
    left[:, a_row, a_column] = _numbers(a, shape.type, per_register)
    right[:, b_row, b_column] = _numbers(b, shape.type, per_register)
    sums = np.empty((warps, 16, 8))
    sums[:, C_ROW, C_COLUMN] = c.view(np.int32 if shape.sums == "s32" else np.float32)
    result = left @ right + sums
    if shape.sums == "s32":
        return result.astype(np.int64).astype(np.int32).view(np.uint32)[:, C_ROW, C_COLUMN]
    return canonical(to_float32(result, "rz"))[:, C_ROW, C_COLUMN].view(np.uint32)


def _numbers(registers: Array, kind: str, per_register: int) -> Array:
    """Return the numbers in registers, [warps, threads, registers, numbers]."""
    parts = np.ascontiguousarray(registers).view({"bf16": "u2", "f16": "f2", "s8": "i1"}[kind])
    numbers = from_bfloat16(parts) if kind == "bf16" else parts
    return numbers.astype(np.float64).reshape(*registers.shape, per_register)

"""Rounding half to even, like hardware and torch, also under Triton's interpreter; and sums in a fixed order."""

import triton
import triton.language as tl

from localllm.runtime.kernels.gpu.launch import INTERPRETED

MAX_STAGES = tl.constexpr(10)  # of a sum of up to 1,024 values


@triton.jit
def round_to_dtype(x, TYPE: tl.constexpr):
    """Convert float32 values to another type; the interpreter would truncate to bfloat16."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def sum_in_pairs(x):
    """Sum the rows of x [heads, dim], [heads, 1], in an order that does not depend on how threads share x.

    So different kernels get the same bits.
    """
    for _ in tl.static_range(MAX_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        if x.shape[1] > 1:
            first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = first + second
    return x

"""Rounding half to even, like hardware and torch, also under Triton's interpreter."""

import triton
import triton.language as tl

from localllm.runtime.kernels.gpu.launch import INTERPRETED


@triton.jit
def round_to_dtype(x, TYPE: tl.constexpr):
    """Convert float32 values to another type; the interpreter would truncate to bfloat16."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)

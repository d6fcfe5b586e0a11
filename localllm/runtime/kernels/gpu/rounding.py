"""Rounding as hardware and torch do it, to the nearest and half to even, under Triton's interpreter too."""

import triton
import triton.language as tl

from localllm.runtime.kernels.gpu.launch import INTERPRETED


@triton.jit
def round_to_dtype(x, TYPE: tl.constexpr):
    """float32 numbers in another type; the interpreter alone would cut bfloat16 off."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)

"""Vectors in 8 bits with a scale each, as the cache keeps keys and values: whole numbers, or floats of three bits
behind the point (e4m3 of the OCP 8-bit floating point specification, 2023).

A scale is a bfloat16: it reaches as far as float32, and as numbers are rounded by the scale as it is kept, its own
rounding makes steps 0.4% wider at most and no error beside theirs.
"""

import torch
from torch import Tensor

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest numbers of the formats
SCALE_DTYPE = torch.bfloat16
EXACT_SCALE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # dtypes that hold every scale
E4M3_FROM_HALF = 2.0**8  # e4m3 counts its exponents from 7, float16 from 15
E4M3_HALF_MASK = -0x4001  # of a float16 that e4m3 shifted by seven has: all but its first bit of the exponent


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [..., dim] -> numbers of `dtype` [..., dim], scales [...] bfloat16.

    A vector's largest number becomes the largest of the format. NaN and infinity make a scale that is not finite,
    and the whole vector is read as NaN or infinity: nothing wrong is hidden.
    """
    largest = x.abs().amax(-1).float()
    # Never 0, to divide by; NaN stays NaN.
    scale = (largest / DTYPE_MAX[dtype]).clamp(min=torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    numbers = x.float() / scale.float()[..., None]
    return (numbers.round() if dtype == torch.int8 else numbers).clamp(-DTYPE_MAX[dtype], DTYPE_MAX[dtype]).to(
        dtype
    ), scale


def dequantize_vectors(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """q: [..., dim]; scale: [...] -> [..., dim], each rounded once."""
    if q.dtype == torch.int8 and dtype in EXACT_SCALE_DTYPES:
        return q.to(dtype).mul_(scale.to(dtype)[..., None])
    return to_float32(q).mul_(scale.float()[..., None]).to(dtype)


def to_float32(q: Tensor) -> Tensor:
    """The numbers of a format as float32, without their scales."""
    if q.dtype == torch.int8 or q.device.type != "cpu":
        return q.float()
    # torch converts e4m3 on a CPU number by number; in float16 the same bits mean 2**-8 of it: ten times faster.
    halves = (q.view(torch.int8).to(torch.int16) << 7).bitwise_and_(E4M3_HALF_MASK).view(torch.float16)
    return halves.float().mul_(E4M3_FROM_HALF)

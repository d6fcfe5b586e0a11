"""Vectors in 8 bits with a scale each, for keys and values in the cache: integers, or floats with three mantissa
bits (e4m3 of the OCP 8-bit floating point specification, 2023).

A scale is a bfloat16, which has the range of float32. Values are rounded with the stored scale, so that its own
rounding only makes steps up to 0.4% wider and adds no error.
"""

import torch
from torch import Tensor

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # largest values of the formats
SCALE_DTYPE = torch.bfloat16
EXACT_SCALE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # dtypes that represent every scale
E4M3_FROM_HALF = 2.0**8  # ratio of exponent biases: e4m3 has 7, float16 has 15
E4M3_HALF_MASK = -0x4001  # the bits of a float16 that e4m3 shifted by seven has: all except the first exponent bit


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [..., dim] to `dtype` [..., dim], with scales [...] bfloat16.

    A vector's largest value becomes the largest of the format. NaN and infinity make the scale, and thereby the
    entire vector, NaN or infinite, so that no error is hidden.
    """
    largest = x.abs().amax(-1).float()
    # Never 0, which cannot be divided by; NaN stays NaN.
    scale = (largest / DTYPE_MAX[dtype]).clamp(min=torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    numbers = x.float() / scale.float()[..., None]
    return (numbers.round() if dtype == torch.int8 else numbers).clamp(-DTYPE_MAX[dtype], DTYPE_MAX[dtype]).to(
        dtype
    ), scale


def dequantize_vectors(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize with a single rounding. q: [..., dim]; scale: [...] -> [..., dim]"""
    if q.dtype == torch.int8 and dtype in EXACT_SCALE_DTYPES:
        return q.to(dtype).mul_(scale.to(dtype)[..., None])
    return to_float32(q).mul_(scale.float()[..., None]).to(dtype)


def to_float32(q: Tensor) -> Tensor:
    """Convert quantized values to float32, without their scales."""
    if q.dtype == torch.int8 or q.device.type != "cpu":
        return q.float()
    # torch converts e4m3 on a CPU one by one; the same bits in float16 are 2**-8 of the value: ten times faster.
    halves = (q.view(torch.int8).to(torch.int16) << 7).bitwise_and_(E4M3_HALF_MASK).view(torch.float16)
    return halves.float().mul_(E4M3_FROM_HALF)

"""Vectors in 8 bits with a scale each, for keys and values in the cache: integers, or floats with three mantissa
bits (e4m3 of the OCP 8-bit floating point specification, 2023). Or in 4 bits with a scale and an offset each:
integers from -8 to 7 in two's complement, two in a byte, the even dimension in its lower half.

A scale is a bfloat16, which has the range of float32. Values are rounded with the stored scale, so that its own
rounding only makes steps up to 0.4% wider and adds no error. Offsets are bfloat16, too.
"""

import torch
from torch import Tensor

INT4 = torch.uint8  # two codes in a byte
KVDtype = torch.dtype | tuple[torch.dtype, torch.dtype]  # of keys and values, or of each
EIGHT_BIT_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
KV_DTYPES: dict[str, KVDtype] = {**EIGHT_BIT_DTYPES, "k8v4": (torch.int8, INT4), "int4": INT4}
DTYPE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, INT4: 7.0}  # largest values of the formats
INT4_MIN, INT4_STEPS = -8, 15
SCALE_DTYPE = torch.bfloat16
EXACT_SCALE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # dtypes that represent every scale
E4M3_FROM_HALF = 2.0**8  # ratio of exponent biases: e4m3 has 7, float16 has 15
E4M3_HALF_MASK = -0x4001  # the bits of a float16 that e4m3 shifted by seven has: all except the first exponent bit


def kv_dtype_name(dtype: KVDtype) -> str:
    """Return the name of a cache's dtype, as for `--kv-dtype`, or that of the model's dtype."""
    names = {dtype: name for name, dtype in KV_DTYPES.items()}
    return names.get(dtype) or str(dtype).removeprefix("torch.")


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [..., dim] to `dtype` [..., dim], with scales [...] bfloat16; to INT4 as `quantize_to_int4`.

    A vector's largest value becomes the largest of the format. NaN and infinity make the scale, and thereby the
    entire vector, NaN or infinite, so that no error is hidden.
    """
    if dtype == INT4:
        return quantize_to_int4(x)
    largest = x.abs().amax(-1).float()
    # Never 0, which cannot be divided by; NaN stays NaN.
    scale = (largest / DTYPE_MAX[dtype]).clamp(min=torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    numbers = x.float() / scale.float()[..., None]
    return (numbers.round() if dtype == torch.int8 else numbers).clamp(-DTYPE_MAX[dtype], DTYPE_MAX[dtype]).to(
        dtype
    ), scale


def quantize_to_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [..., dim] to INT4 [..., dim / 2], with scale and offset [..., 2] bfloat16.

    A vector's smallest value becomes the smallest code, its largest value the largest.
    """
    x = x.float()
    low, high = x.aminmax(dim=-1)
    # Divided first, as the difference may overflow.
    scale = (high / INT4_STEPS - low / INT4_STEPS).clamp(min=torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    offset = (low - INT4_MIN * scale.float()).to(SCALE_DTYPE)
    codes = ((x - offset.float()[..., None]) / scale.float()[..., None]).round()
    codes = codes.clamp(INT4_MIN, DTYPE_MAX[INT4]).to(torch.int8).view(INT4)
    return codes[..., ::2].bitwise_and(15).bitwise_or(codes[..., 1::2] << 4), torch.stack((scale, offset), -1)


def dequantize_vectors(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize with a single rounding. q: [..., dim]; scale: [...] -> [..., dim]

    q in INT4: [..., dim / 2]; scale: [..., 2], scale and offset
    """
    if q.dtype == INT4:
        exact = dtype if dtype in EXACT_SCALE_DTYPES else torch.float32
        codes = unpack_int4(q, exact)
        factor, offset = scale.to(exact)[..., None, :].unbind(-1)
        return torch.addcmul(offset, codes, factor, out=codes).to(dtype)
    if q.dtype == torch.int8 and dtype in EXACT_SCALE_DTYPES:
        return q.to(dtype).mul_(scale.to(dtype)[..., None])
    return to_float32(q).mul_(scale.float()[..., None]).to(dtype)


def unpack_int4(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes from -8 to 7. q: [..., dim / 2] -> [..., dim]"""
    pairs = torch.empty(*q.shape, 2, dtype=dtype, device=q.device)
    codes = q.view(torch.int8)
    pairs[..., 0], pairs[..., 1] = codes << 4 >> 4, codes >> 4
    return pairs.flatten(-2)


def rotate_vectors(x: Tensor, size: int) -> Tensor:
    """Multiply each `size` adjacent elements of x [..., dim] by the Hadamard matrix of that size, a power of two.

    The matrix is divided by sqrt(size), so that it is orthogonal and its own inverse: products of two rotated
    vectors are unchanged, and an outlier is spread over `size` elements (QuaRot, Ashkboos et al. 2024). Sums are
    in float32, in a fixed order.
    """
    x, half = x.float(), 1
    while half < size:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack((first + second, first - second), -2).flatten(-3), 2 * half
    return x * size**-0.5


def rotation_size(dim: int) -> int:
    """Return the largest power of two that divides `dim`."""
    return dim & -dim


def to_float32(q: Tensor) -> Tensor:
    """Convert quantized values to float32, without their scales."""
    if q.dtype == torch.int8 or q.device.type != "cpu":
        return q.float()
    # torch converts e4m3 on a CPU one by one; the same bits in float16 are 2**-8 of the value: ten times faster.
    halves = (q.view(torch.int8).to(torch.int16) << 7).bitwise_and_(E4M3_HALF_MASK).view(torch.float16)
    return halves.float().mul_(E4M3_FROM_HALF)

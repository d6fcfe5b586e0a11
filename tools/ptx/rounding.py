"""Floating-point arithmetic as PTX defines it where NumPy has no operation for it: rounding modes, fused
multiply-add, bfloat16, and canonical NaN.

A result that is rounded twice, to float64 and then to its type, may be wrong. So sums in float64 are rounded to
odd: if they are inexact, the last bit is 1. From such a number, every narrower rounding is that of the exact sum
(Boldo and Melquiond, 2008).
"""

from typing import Any

import numpy as np

F32_NAN, BF16_NAN = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)  # the NaN that operations return
FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = np.finfo(np.float32).tiny
Array = np.ndarray[Any, Any]


def canonical(x: Array) -> Array:
    """Replace every NaN of float32 by the canonical one. PTX ISA: NaN payloads are not preserved."""
    if np.isnan(x.sum()):  # also of infinities, but hardly ever of numbers alone
        nan = np.isnan(x)
        x = x.copy()
        x.view(np.uint32)[nan] = F32_NAN
    return x


def flush(x: Array) -> Array:
    """Return subnormal numbers of float32 as zero with their sign (.ftz)."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def saturate(x: Array) -> Array:
    """Clamp to 0 .. 1; NaN becomes +0 (.sat)."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1)) + x.dtype.type(0)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b rounded, and its error, exactly (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a * b rounded, and its error, exactly (Dekker), if nothing overflows."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = (_halves(x) for x in (a, b))
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(x: Array) -> tuple[Array, Array]:
    high = x * 134217729.0  # 2**27 + 1
    high = high - (high - x)
    return high, x - high


def sum_to_odd(a: Array, b: Array) -> Array:
    """Return a + b in float64, rounded to odd."""
    total, error = two_sum(a, b)
    adjusted = (error != 0) & np.isfinite(error) & ((total.view(np.int64) & 1) == 0)
    if adjusted.any():
        toward = np.where(error > 0, np.inf, -np.inf)
        total = np.where(adjusted, np.nextafter(total, toward), total)
    return total


def to_float32(x: Array, mode: str = "rn") -> Array:
    """Round float64 to float32: to nearest even (rn), to zero (rz), down (rm), up (rp) or to odd (ro)."""
    nearest = x.astype(np.float32)
    if mode == "rn":
        return nearest
    back = nearest.astype(np.float64)
    if mode == "rm":
        return np.where(back > x, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    if mode == "rp":
        return np.where(back < x, np.nextafter(nearest, np.float32(np.inf)), nearest)
    overflowed = np.isinf(nearest) & np.isfinite(x)
    truncated = np.where(np.abs(back) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
    truncated = np.where(overflowed, np.copysign(np.float32(FLOAT32_MAX), nearest), truncated)
    if mode == "rz":
        return truncated
    inexact = (truncated.astype(np.float64) != x) & ~np.isnan(x)
    return (truncated.view(np.uint32) | inexact).view(np.float32)


def fma_float32(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """Return a * b + c with one rounding. The product of two float32 is exact in float64."""
    return canonical(add_to_float32(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64), mode))


def add_to_float32(a: Array, b: Array, mode: str) -> Array:
    """Add float64 numbers and round once. What cancels is +0, and -0 if rounded down."""
    total = sum_to_odd(a, b)
    if mode == "rm":
        total = np.where((total == 0) & (np.signbit(a) != np.signbit(b)), -0.0, total)
    return to_float32(total, mode)


def fma_float64(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c with one rounding to nearest even (Boldo and Melquiond), if nothing overflows."""
    product, product_error = two_product(a, b)
    total, total_error = two_sum(c, product_error)
    high, low = two_sum(product, total)
    result = high + sum_to_odd(total_error, low)
    return np.where(np.isfinite(result), result, a * b + c)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Array, mode: str = "rn") -> Array:
    """Round float32 to bfloat16, as bits in uint16."""
    bits = x.view(np.uint32)
    if mode == "rn":
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        assert mode == "rz", mode
        rounded = bits >> np.uint32(16)
    return np.where(np.isnan(x), BF16_NAN, rounded.astype(np.uint16))


def fma_bfloat16(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of bits in uint16, with one rounding."""
    a, b, c = (from_bfloat16(x).astype(np.float64) for x in (a, b, c))
    return to_bfloat16(to_float32(sum_to_odd(a * b, c), "ro"))

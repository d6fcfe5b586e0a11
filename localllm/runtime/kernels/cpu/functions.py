"""Functions of 16 numbers at a time, in float32: a number's value depends on nothing else, where torch's depends
on whether it stands in a whole vector or behind the last one."""

from localllm.runtime.kernels.cpu.ir import LANES, Program, Value

EXP_MAX, EXP_MIN = 88.0, -87.3  # what exp gives beyond them is what it gives there: 2^127, and nearly zero
# exp(r) = 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2 (Cephes, expf)
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440e-4


def exp(p: Program, x: Value) -> Value:
    inside = p.minnum(p.maxnum(x, p.vector(EXP_MIN)), p.vector(EXP_MAX))
    power = (inside * 1.4426950408889634).round_to_int()
    n = power.to_float32()
    r = p.fma(n, p.vector(-LN_2_LOW), p.fma(n, p.vector(-LN_2_HIGH), inside))
    total = p.vector(EXP_POLYNOMIAL[0])
    for factor in EXP_POLYNOMIAL[1:]:
        total = p.fma(total, r, p.vector(factor))
    found = p.fma(total, r * r, r) + 1.0
    return p.propagate_nan(x, found * p.bitcast_float((power + 127) << 23))


def sigmoid(p: Program, x: Value) -> Value:
    """1 / (1 + exp(-x))"""
    return p.vector(1.0) / (exp(p, p.vector(0.0) - x) + 1.0)


def tanh(p: Program, x: Value) -> Value:
    """1 - 2 / (1 + exp(2 x)): within 1.2e-7, also where x is small."""
    return p.vector(1.0) - p.vector(2.0) / (exp(p, x * 2.0) + 1.0)


def sum_vectors(p: Program, vectors: list[Value]) -> Value:
    """The sum of each of 16 vectors, side by side: of all in the same pairs, 8, 4, 2 and 1 lanes apart."""
    for distance in (8, 4, 2, 1):
        low = [lane for lane in range(2 * LANES) if lane % (2 * distance) < distance]
        high = [lane + distance for lane in low]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [p.shuffle(a, b, low) + p.shuffle(a, b, high) for a, b in pairs]
    return vectors[0]

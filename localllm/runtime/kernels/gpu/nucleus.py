"""Selection of the tokens that may be sampled: functions of the kernels in `sampling.py`, for one row.

x = (logit - largest logit) / temperature is at most 0. A token's weight is exp(x) as an integer multiple of 2^-44,
so that sums of weights are exact and do not depend on the order or on other rows. top_k and top_p correspond to
the largest threshold for which the tokens at or above it are at least k, or have top_p of the total weight. Both
are first searched among 32 levels of x. Below the lowest level, every weight is 0.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from localllm.runtime.kernels.gpu.launch import INTERPRETED

WEIGHT_UNIT = tl.constexpr(2.0**44)
MAX_VOCABULARY = 2**19 - 1  # so that the weights of a row sum to less than 2^63
LEVELS = tl.constexpr(32)
FINE_LEVELS = tl.constexpr(24)  # levels at intervals of 0.5; a nucleus rarely reaches below them
LEVEL_TOP = tl.constexpr(0.5)  # above every x, and a 32nd of its distance to the first level is exact


@triton.jit
def exp_weight(x):
    """exp(x) for x <= 0 as an integer multiple of 2^-44, with the same exp as torch"""
    power = tl.exp(x) if INTERPRETED else libdevice.exp(x)
    return tl.cast(power * WEIGHT_UNIT, tl.int64)


@triton.jit
def candidate_weight(x, threshold, min_p):
    whole = exp_weight(x)
    return tl.where((x >= threshold) & (whole >= tl.cast(min_p * WEIGHT_UNIT, tl.int64)), whole, 0)


@triton.jit
def required_mass(top_p, total):
    """Return top_p of the total, rounded up."""
    return tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def coarse_levels():
    i = tl.arange(0, LEVELS)
    return tl.where(i < FINE_LEVELS, -0.5 * (i + 1), -0.5 * FINE_LEVELS - 2.5 * (i + 1 - FINE_LEVELS))


@triton.jit
def fine_levels(low, high):
    """Return levels from just below `high` down to `low`."""
    return high - (high - low) * (1.0 / LEVELS) * (tl.arange(0, LEVELS) + 1)


@triton.jit
def tally_levels(x, level):
    """Return how many of x [parts, lanes] reach each level, and their weights, [lanes, LEVELS].

    Sums run over the first dimension, whose elements are in one thread.
    """
    reached = x[:, :, None] >= level[None, None, :]
    whole = tl.broadcast_to(exp_weight(x)[:, :, None], reached.shape)
    return tl.sum(reached.to(tl.int32), 0), tl.sum(tl.where(reached, whole, 0), 0)


@triton.jit
def bracket(level, reached, top):
    """Return the highest level that is reached, and the one above it."""
    low = tl.max(tl.where(reached, level, -float("inf")))
    return low, tl.min(tl.where(reached, top, level))


@triton.jit
def sampling_limits(counts, masses, top_k, top_p, min_p):
    """Return the effective top_k (0: no limit), whether a threshold must be searched, and the sufficient levels.

    counts, masses: [LEVELS], of all tokens at or above each level. A level is sufficient if it is at or below
    every token that may be sampled.
    """
    top_k = tl.where(top_k >= tl.max(counts), 0, top_k)
    lowest = tl.arange(0, LEVELS) == LEVELS - 1
    below_min_p = (tl.exp(coarse_levels()) < 0.99 * min_p) | lowest
    enough = tl.where(
        top_p < 1, (masses >= required_mass(top_p, tl.max(masses))).to(tl.int32), below_min_p.to(tl.int32)
    )
    enough = tl.where(top_k > 0, (counts >= top_k).to(tl.int32), enough)
    return top_k, (top_k > 0) | (top_p < 1), enough > 0


@triton.jit
def first_selected(values, chosen):
    """Return the first chosen of values that increase."""
    return tl.min(tl.where(chosen, values, tl.max(values)))


@triton.jit
def mass_above(p_x, length, threshold, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int64)
    for i in range(0, length, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(p_x + at, mask=at < length, other=-float("inf"))
        total += tl.where(x >= threshold, exp_weight(x), 0)
    return tl.sum(total)


@triton.jit
def find_threshold(p_x, length, low, high, need, by_mass, BLOCK: tl.constexpr):
    """Return the largest x that is reached by `need` tokens, or by tokens of weight `need` if by_mass.

    `low` is reached by enough tokens, `high` is not. Each pass halves the interval, until one value is left.
    """
    smallest, largest = low, high
    while smallest < largest:
        middle = smallest + (largest - smallest) * 0.5
        middle = tl.where(middle > smallest, middle, largest)
        count = tl.zeros([BLOCK], tl.int32)
        mass = tl.zeros([BLOCK], tl.int64)
        upper_smallest = tl.full([BLOCK], float("inf"), tl.float32)
        upper_largest = tl.full([BLOCK], -float("inf"), tl.float32)
        lower_smallest = tl.full([BLOCK], float("inf"), tl.float32)
        lower_largest = tl.full([BLOCK], -float("inf"), tl.float32)
        for i in range(0, length, BLOCK):
            at = i + tl.arange(0, BLOCK)
            x = tl.load(p_x + at, mask=at < length, other=-float("inf"))
            reached = x >= middle
            count += reached.to(tl.int32)
            mass += tl.where(reached, exp_weight(x), 0)
            upper = reached & (x < high)
            lower = (x >= low) & (x < middle)
            upper_smallest = tl.where(upper, tl.minimum(upper_smallest, x), upper_smallest)
            upper_largest = tl.where(upper, tl.maximum(upper_largest, x), upper_largest)
            lower_smallest = tl.where(lower, tl.minimum(lower_smallest, x), lower_smallest)
            lower_largest = tl.where(lower, tl.maximum(lower_largest, x), lower_largest)
        enough = tl.where(by_mass, tl.sum(mass) >= need, tl.sum(count).to(tl.int64) >= need)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        smallest = tl.where(enough, tl.min(upper_smallest), tl.min(lower_smallest))
        largest = tl.where(enough, tl.max(upper_largest), tl.max(lower_largest))
    return smallest

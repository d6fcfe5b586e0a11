"""Selection of the tokens that may be sampled: functions of the kernels in `sampling.py`, for one row.

x = (logit - largest logit) / temperature is at most 0. A token's weight is exp(x) as an integer multiple of 2^-44,
so that sums of weights are exact and do not depend on the order or on other rows. top_k and top_p correspond to
the largest threshold for which the tokens at or above it are at least k, or have top_p of the total weight. Both
are first searched among 32 levels of x. Below the lowest level, every weight is 0.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from localllm.runtime import sampler
from localllm.runtime.kernels.gpu.launch import INTERPRETED, allow_next_kernel, wait_for_inputs

WEIGHT_UNIT = tl.constexpr(2.0**44)
MAX_VOCABULARY = 2**19 - 1  # so that the weights of a row sum to less than 2^63
LEVELS = tl.constexpr(32)
FINE_LEVELS = tl.constexpr(24)  # levels at intervals of 0.5; a nucleus rarely reaches below them
LEVEL_TOP = tl.constexpr(0.5)  # above every x, and a 32nd of its distance to the first level is exact
NOT_FINITE = tl.constexpr(sampler.NOT_FINITE)
ALL_FORBIDDEN = tl.constexpr(sampler.ALL_FORBIDDEN)
CHUNKS_PER_LOAD = tl.constexpr(4)  # chunks whose loads wait for the L2 cache together


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


@triton.jit
def splitmix64(z):
    """The finalizer of SplitMix64, like `sampler.splitmix64_finalize`."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform_random(seed, position):
    """Like `sampler.uniform_random`."""
    z = splitmix64(splitmix64(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (z >> 11).to(tl.float64) * 2.0**-53


@triton.jit
def invert_cumulative(mass, point):
    """Return the index at which the cumulative sum first exceeds the point, and the rest of the point within
    it.
    """
    sums = tl.cumsum(mass)
    below = sums <= point
    return tl.sum(below.to(tl.int32)), point - tl.max(tl.where(below, sums, 0))


@triton.jit
def scale_point(point, total):
    """Scale a point in [0, 1) to an integer below the total."""
    return tl.minimum((point * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def load_masses(p_x, i_token, vocabulary, threshold, min_p):
    x = tl.load(p_x + i_token, mask=i_token < vocabulary, other=-float("inf"))
    return candidate_weight(x, threshold, min_p)


@triton.jit
def sampling_threshold(
    p_x, length, top_k, top_p, low, high, masses, measured, finer_counts, finer_masses, BLOCK: tl.constexpr
):
    """Return the lowest x that top_k and top_p keep.

    low, high: levels around the first threshold to search, top_k's if there is one; finer_counts, finer_masses: of
    the levels between these, if measured
    """
    total = tl.max(masses)
    fine = fine_levels(low, high)
    threshold = -float("inf")
    if top_k > 0:
        if measured:
            low, high = bracket(fine, finer_counts >= top_k, high)
        threshold = find_threshold(p_x, length, low, high, top_k.to(tl.int64), False, BLOCK)
        total = mass_above(p_x, length, threshold, BLOCK)
    if top_p < 1:
        need = required_mass(top_p, total)
        if top_k > 0:
            low, high = bracket(coarse_levels(), masses >= need, LEVEL_TOP)
        elif measured:
            low, high = bracket(fine, finer_masses >= need, high)
        threshold = find_threshold(p_x, length, low, high, need, True, BLOCK)
    return threshold


@triton.jit
def draw_from_list(p_x, p_token, size, point, threshold, min_p, CANDIDATES: tl.constexpr):
    i_listed = tl.arange(0, CANDIDATES)
    x = tl.load(p_x + i_listed, mask=i_listed < size, other=-float("inf"))
    mass = candidate_weight(x, threshold, min_p)
    at, _ = invert_cumulative(mass, scale_point(point, tl.sum(mass)))
    return tl.load(p_token + at)


@triton.jit
def draw_from_row(
    p_x, vocabulary, p_mass, chunks, point, threshold, min_p, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """Sample from all tokens of a row. p_mass: weights of the chunks, valid if no token is filtered out."""
    if (threshold > -float("inf")) | (min_p > 0):
        for first in range(0, chunks, CHUNKS_PER_LOAD):
            i_chunk = first + tl.arange(0, CHUNKS_PER_LOAD)
            i_token = i_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            mass = tl.sum(load_masses(p_x, i_token, vocabulary, threshold, min_p), 1)
            tl.store(p_mass + i_chunk, mass, mask=i_chunk < chunks)
        tl.debug_barrier()
    i_chunk = tl.arange(0, CHUNKS)
    mass = tl.load(p_mass + i_chunk, mask=i_chunk < chunks, other=0)
    chunk, rest = invert_cumulative(mass, scale_point(point, tl.sum(mass)))
    i_token = chunk * CHUNK + tl.arange(0, CHUNK)
    at, _ = invert_cumulative(load_masses(p_x, i_token, vocabulary, threshold, min_p), rest)
    return chunk * CHUNK + at


@triton.jit
def draw_kernel(
    p_choices,
    p_logits,
    s_logits,
    vocabulary,
    p_live,
    p_seed,
    p_position,
    p_history,
    p_tokens,
    context,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_peak,
    p_peak_token,
    p_masses,
    p_level_counts,
    p_level_masses,
    p_listed,
    p_listed_token,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last sampling kernel, one program per row.

    It inverts the cumulative distribution in the order of the vocabulary at a point that is a function of seed and
    position alone: in the list of `gather_candidates_kernel`, or, if that cannot hold all candidates, in the chunk
    that contains the point.
    """
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    if tl.load(p_live + row) == 0:
        return
    peak, token = row_peak(p_peak, p_peak_token, row, chunks, CHUNKS)
    if (tl.load(p_temperature + row) > 0) & (tl.abs(peak) < float("inf")):
        p_level_counts += 2 * row * LEVELS
        p_level_masses += 2 * row * LEVELS
        i_level = tl.arange(0, LEVELS)
        counts, masses = tl.load(p_level_counts + i_level), tl.load(p_level_masses + i_level)
        top_k, top_p, min_p = tl.load(p_top_k + row), tl.load(p_top_p + row), tl.load(p_min_p + row)
        top_k, sought, enough = sampling_limits(counts, masses, top_k, top_p, min_p)
        size = first_selected(counts, enough)
        p_x, length = p_logits + row * s_logits, vocabulary
        if size <= CANDIDATES:
            p_x, length = p_listed + row * CANDIDATES, size
        threshold = -float("inf")
        if sought:
            low, high = bracket(coarse_levels(), enough, LEVEL_TOP)
            finer_counts = tl.load(p_level_counts + LEVELS + i_level)
            finer_masses = tl.load(p_level_masses + LEVELS + i_level)
            threshold = sampling_threshold(
                p_x, length, top_k, top_p, low, high, masses, size > CANDIDATES, finer_counts, finer_masses, BLOCK
            )
        point = uniform_random(tl.load(p_seed + row), tl.load(p_position + row))
        if size <= CANDIDATES:
            p_token = p_listed_token + row * CANDIDATES
            token = draw_from_list(p_x, p_token, size, point, threshold, min_p, CANDIDATES)
        else:
            p_mass = p_masses + row * chunks
            token = draw_from_row(p_x, vocabulary, p_mass, chunks, point, threshold, min_p, CHUNKS, CHUNK)
    store_choice(token, peak, p_choices, p_position, p_history, p_tokens, context, row)


@triton.jit
def row_peak(p_peak, p_peak_token, row, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a row, infinity if it contains NaN, and the first token that has it."""
    i_chunk = tl.arange(0, CHUNKS)
    peak = tl.load(p_peak + row * chunks + i_chunk, mask=i_chunk < chunks, other=-float("inf"))
    largest = tl.max(peak)
    first = tl.min(tl.where(peak == largest, i_chunk, CHUNKS))
    return largest, tl.load(p_peak_token + row * chunks + first)


@triton.jit
def store_choice(token, peak, p_choices, p_position, p_history, p_tokens, context, row):
    """Store the token or why there is none, append it to the history, and advance the position."""
    choice = tl.where(peak == float("inf"), NOT_FINITE, tl.where(peak == -float("inf"), ALL_FORBIDDEN, token))
    tl.store(p_choices + row, choice.to(tl.int64))
    position = tl.load(p_position + row)
    tl.debug_barrier()  # all threads have read the position
    tl.store(p_position + row, position + 1)
    if p_tokens is not None:
        history = tl.load(p_history + row).to(tl.int64)
        known = (history >= 0) & (position < context)
        tl.store(p_tokens + history * context + position, tl.maximum(choice, 0), mask=known)

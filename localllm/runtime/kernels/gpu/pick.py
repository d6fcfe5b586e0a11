"""The last sampling kernel, one program per row, and what it shares with the greedy one.

It inverts the cumulative distribution in the order of the vocabulary at a point that is a function of seed and
position alone: in the list of `gather_candidates_kernel`, or, if that cannot hold all candidates, in the chunk
that contains the point.
"""

import triton
import triton.language as tl

from localllm.runtime import sampler
from localllm.runtime.kernels.gpu.launch import allow_next_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.nucleus import (
    LEVEL_TOP,
    LEVELS,
    bracket,
    candidate_weight,
    coarse_levels,
    find_threshold,
    fine_levels,
    first_selected,
    mass_above,
    required_mass,
    sampling_limits,
)

NOT_FINITE = tl.constexpr(sampler.NOT_FINITE)
ALL_FORBIDDEN = tl.constexpr(sampler.ALL_FORBIDDEN)
CHUNKS_PER_LOAD = tl.constexpr(4)  # chunks whose loads wait for the L2 cache together


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
    tl.store(p_position + row, position + 1)
    if p_tokens is not None:
        history = tl.load(p_history + row).to(tl.int64)
        known = (history >= 0) & (position < context)
        tl.store(p_tokens + history * context + position, tl.maximum(choice, 0), mask=known)


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

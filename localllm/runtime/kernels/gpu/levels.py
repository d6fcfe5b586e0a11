"""Counts the tokens of a row that reach each of 32 levels of x, sums their weights, and lists the candidates.

Each program processes one chunk of one row; sums are of integers, and so do not depend on the order.
"""

import triton
import triton.language as tl

from localllm.runtime.kernels.gpu.launch import allow_next_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.nucleus import (
    LEVEL_TOP,
    LEVELS,
    bracket,
    coarse_levels,
    fine_levels,
    first_selected,
    sampling_limits,
    tally_levels,
)
from localllm.runtime.kernels.gpu.pick import row_peak

LEVELS_WARPS = 4  # for levels_kernel
TALLY_LANES = tl.constexpr(LEVELS_WARPS)  # of `tally_levels`: one per warp, so that sums need no exchange
TALLY_PARTS = tl.constexpr(32)  # summed by one thread at a time


@triton.jit
def add_levels(count, mass, p_level_counts, p_level_masses, at):
    i_level = at * LEVELS + tl.arange(0, LEVELS)
    tl.atomic_add(p_level_counts + i_level, count, sem="relaxed")
    tl.atomic_add(p_level_masses + i_level, mass, sem="relaxed")


@triton.jit
def tally_chunk(p_row, chunk, vocabulary, peak, temperature, level, CHUNK: tl.constexpr):
    """Write x over the logits, and return counts and weights of the chunk's tokens that reach each level,
    [LEVELS].
    """
    counts = tl.zeros([TALLY_LANES, LEVELS], tl.int32)
    masses = tl.zeros([TALLY_LANES, LEVELS], tl.int64)
    lane = tl.arange(0, TALLY_PARTS)[:, None] * TALLY_LANES + tl.arange(0, TALLY_LANES)[None, :]
    for i in range(0, CHUNK, TALLY_PARTS * TALLY_LANES):
        i_token = chunk * CHUNK + i + lane
        m_token = (i + lane < CHUNK) & (i_token < vocabulary)
        logit = tl.load(p_row + i_token, mask=m_token, other=-float("inf"))
        # The largest logit becomes 0, so that no temperature above 0 overflows.
        x = tl.div_rn(logit - peak, temperature)
        tl.store(p_row + i_token, x, mask=m_token)
        count, mass = tally_levels(x, level)
        counts += count
        masses += mass
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def levels_kernel(
    p_logits,
    s_logits,
    vocabulary,
    p_live,
    p_temperature,
    p_peak,
    p_peak_token,
    p_counts,
    p_masses,
    p_level_counts,
    p_level_masses,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    temperature = tl.load(p_temperature + row)
    if (tl.load(p_live + row) == 0) | (temperature == 0):
        return
    peak, _ = row_peak(p_peak, p_peak_token, row, chunks, CHUNKS)
    if tl.abs(peak) == float("inf"):
        return
    x_row = p_logits + row * s_logits
    count, mass = tally_chunk(x_row, chunk, vocabulary, peak, temperature, coarse_levels(), CHUNK)
    i_level = tl.arange(0, LEVELS)
    tl.store(p_counts + (row * LEVELS + i_level) * chunks + chunk, count)
    tl.store(p_masses + row * chunks + chunk, tl.max(mass))
    add_levels(count, mass, p_level_counts, p_level_masses, 2 * row)


@triton.jit
def gather_candidates_kernel(
    p_logits,
    s_logits,
    vocabulary,
    p_live,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_counts,
    p_level_counts,
    p_level_masses,
    p_listed,
    p_listed_token,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    if (tl.load(p_live + row) == 0) | (tl.load(p_temperature + row) == 0):
        return
    i_level = tl.arange(0, LEVELS)
    counts = tl.load(p_level_counts + 2 * row * LEVELS + i_level)
    if tl.max(counts) == 0:  # not measured: the row contains NaN or infinity, or every token is forbidden
        return
    masses = tl.load(p_level_masses + 2 * row * LEVELS + i_level)
    top_k, top_p, min_p = tl.load(p_top_k + row), tl.load(p_top_p + row), tl.load(p_min_p + row)
    top_k, sought, enough = sampling_limits(counts, masses, top_k, top_p, min_p)
    low, high = bracket(coarse_levels(), enough, LEVEL_TOP)
    x_row = p_logits + row * s_logits
    if first_selected(counts, enough) <= CANDIDATES:
        p_count = p_counts + (row * LEVELS + LEVELS - tl.sum(enough.to(tl.int32))) * chunks
        if tl.load(p_count + chunk) > 0:
            i_chunk = tl.arange(0, CHUNKS)
            before = tl.sum(tl.load(p_count + i_chunk, mask=i_chunk < chunk, other=0))
            i_token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(x_row + i_token, mask=i_token < vocabulary, other=-float("inf"))
            reached = x >= low
            at = row * CANDIDATES + before + tl.cumsum(reached.to(tl.int32)) - 1
            tl.store(p_listed + at, x, mask=reached)
            tl.store(p_listed_token + at, i_token, mask=reached)
    elif sought:
        # The row already holds x, which is measured unchanged.
        count, mass = tally_chunk(x_row, chunk, vocabulary, 0.0, 1.0, fine_levels(low, high), CHUNK)
        add_levels(count, mass, p_level_counts, p_level_masses, 2 * row + 1)

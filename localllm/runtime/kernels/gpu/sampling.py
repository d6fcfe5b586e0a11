"""Logits to tokens with the rules of `runtime/sampler.py`, in two or four kernels without waiting on the host.

`peaks_kernel` finds the largest logit of each chunk, and `greedy_kernel` the token of a greedy row. For random
rows, `levels_kernel` writes x over the logits and counts the tokens that reach each of 32 levels, with their
weights; `gather_candidates_kernel` lists the tokens from the level that includes every candidate; `draw_kernel`
finds the thresholds in the list and samples. If the list cannot hold the candidates, `gather_candidates_kernel`
measures 32 finer levels instead, and `draw_kernel` searches the row.

Bytes per row: 4 per token for `peaks_kernel`, and 8 for `levels_kernel`, which are still in the L2 cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import LaunchGrid, allow_next_kernel, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.nucleus import (
    LEVEL_TOP,
    LEVELS,
    bracket,
    coarse_levels,
    draw_kernel,
    fine_levels,
    first_selected,
    row_peak,
    sampling_limits,
    store_choice,
    tally_levels,
)
from localllm.runtime.kernels.gpu.penalties import (
    HISTORY_BLOCK,
    LogitBiases,
    TokenHistory,
    apply_penalties,
    mark_history_kernel,
)

LEVELS_WARPS = 4  # for levels_kernel
TALLY_LANES = tl.constexpr(LEVELS_WARPS)  # of `tally_levels`: one per warp, so that sums need no exchange
TALLY_PARTS = tl.constexpr(32)  # summed by one thread at a time
# Estimated: 150 programs of 1,024 logits for a vocabulary of 152,064 are one wave of a large GPU.
CHUNK_TOKENS = 1024
MAX_CANDIDATES = 1024  # more than most nuclei have, and half of SEARCH_BLOCK: one load per pass of the search
SEARCH_BLOCK = 2048  # tokens that a program searches at a time: eight per thread, in loads of 128 bits


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


@dataclass(frozen=True)
class SamplingColumns:
    """The sampling parameters of the rows of a bucket: [B] on the device."""

    seed: Tensor  # int64
    position: Tensor  # int64, of the token to be sampled; incremented by each step
    live: Tensor  # int32, 0: the row is not read
    top_k: Tensor  # int32
    history: Tensor  # int32, history slot in TokenHistory, -1: none is needed
    answer: Tensor  # int32, position of the answer's first token
    last: Tensor  # int32, repeat_last_n
    temperature: Tensor  # float32, like all that follow
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True)
class SamplingScratch:
    """Intermediate results that the kernels of one step pass on."""

    peak: Tensor  # [B, chunks] float32, infinity for NaN
    peak_token: Tensor  # [B, chunks] int32
    counts: Tensor  # [B, LEVELS, chunks] int32, tokens of the chunk that reach a level
    masses: Tensor  # [B, chunks] int64, total weight of the chunk
    level_counts: Tensor  # [B, 2, LEVELS] int32, of the row; the second are of the finer levels
    level_masses: Tensor  # [B, 2, LEVELS] int64
    listed: Tensor  # [B, MAX_CANDIDATES] float32, x in the order of the vocabulary
    listed_token: Tensor  # [B, MAX_CANDIDATES] int32

    @classmethod
    def allocate(cls, bucket: int, vocabulary: int, device: torch.device) -> "SamplingScratch":
        chunks, levels = triton.cdiv(vocabulary, CHUNK_TOKENS), LEVELS.value

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(bucket, *shape, dtype=dtype, device=device)

        return cls(
            peak=empty(torch.float32, chunks),
            peak_token=empty(torch.int32, chunks),
            counts=empty(torch.int32, levels, chunks),
            masses=empty(torch.int64, chunks),
            level_counts=empty(torch.int32, 2, levels),
            level_masses=empty(torch.int64, 2, levels),
            listed=empty(torch.float32, MAX_CANDIDATES),
            listed_token=empty(torch.int32, MAX_CANDIDATES),
        )


@triton.jit
def peaks_kernel(
    p_logits,
    s_logits,
    vocabulary,
    p_live,
    p_history,
    p_repetition,
    p_presence,
    p_frequency,
    p_marks,
    p_peak,
    p_peak_token,
    p_level_counts,
    p_level_masses,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    if tl.load(p_live + row) == 0:
        return
    i_token = chunk * CHUNK + tl.arange(0, CHUNK)
    m_token = i_token < vocabulary
    logit = tl.load(p_logits + row * s_logits + i_token, mask=m_token, other=-float("inf"))
    if p_marks is not None:
        history = tl.load(p_history + row).to(tl.int64)
        if history >= 0:
            p_mark = p_marks + history * vocabulary + i_token
            mark = tl.load(p_mark, mask=m_token, other=0)
            repetition, presence = tl.load(p_repetition + row), tl.load(p_presence + row)
            logit = apply_penalties(logit, mark, repetition, presence, tl.load(p_frequency + row))
            tl.store(p_logits + row * s_logits + i_token, logit, mask=mark != 0)
            tl.store(p_mark, 0, mask=mark != 0)
    logit = tl.where(logit != logit, float("inf"), logit)
    peak = tl.max(logit)
    at = row * tl.num_programs(1) + chunk
    tl.store(p_peak + at, peak)
    tl.store(p_peak_token + at, tl.min(tl.where(logit == peak, i_token, vocabulary)))
    if p_level_counts is not None and chunk == 0:
        i_level = row * (2 * LEVELS) + tl.arange(0, 2 * LEVELS)
        tl.store(p_level_counts + i_level, 0)
        tl.store(p_level_masses + i_level, 0)


@triton.jit
def greedy_kernel(
    p_choices,
    p_live,
    p_position,
    p_history,
    p_tokens,
    context,
    p_peak,
    p_peak_token,
    chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    if tl.load(p_live + row) != 0:
        peak, token = row_peak(p_peak, p_peak_token, row, chunks, CHUNKS)
        store_choice(token, peak, p_choices, p_position, p_history, p_tokens, context, row)


def sample_tokens(
    logits: Tensor,
    choices: Tensor,
    columns: SamplingColumns,
    scratch: SamplingScratch,
    *,
    any_random: bool,
    penalties: tuple[TokenHistory, LogitBiases] | None,
) -> None:
    """Sample. logits: [N, vocab] float32, modified in place; choices: [N] int64, receives token ids or error
    values.

    The error values are NOT_FINITE and ALL_FORBIDDEN. any_random: some rows have a temperature above 0, otherwise
    all are greedy; penalties: None if no row has a bias or a penalty.
    """
    rows, chunks = len(logits), scratch.peak.shape[1]
    common: dict[str, Any] = {
        **tensor_arguments(columns),
        **tensor_arguments(scratch),
        "p_choices": choices,
        "p_logits": logits,
        "s_logits": logits.stride(0),
        "vocabulary": logits.shape[1],
        "p_marks": None,
        "p_tokens": None,
        "context": 0,
        "chunks": chunks,
        "CHUNKS": triton.next_power_of_2(chunks),
        "CHUNK": CHUNK_TOKENS,
        "CANDIDATES": scratch.listed.shape[1],
        "BLOCK": SEARCH_BLOCK,
    }
    if not any_random:
        common |= {"p_level_counts": None, "p_level_masses": None}

    def run(kernel: Any, grid: LaunchGrid, warps: int, **extra: Any) -> None:
        arguments = {name: value for name, value in (common | extra).items() if name in kernel.arg_names}
        launch_kernel(kernel, grid, warps, device=logits.device, **arguments)

    if penalties:
        history, biases = penalties
        context = history.tokens.shape[1]
        common |= {"p_marks": history.marks, "p_tokens": history.tokens, "context": context}
        bias = {"p_bias_token": biases.token, "p_bias": biases.value, "BIASES": biases.token.shape[1]}
        run(mark_history_kernel, (rows, 1 + triton.cdiv(context, HISTORY_BLOCK)), 4, PART=HISTORY_BLOCK, **bias)
    run(peaks_kernel, (rows, chunks), 4)
    if not any_random:
        return run(greedy_kernel, (rows,), 4)
    run(levels_kernel, (rows, chunks), LEVELS_WARPS)
    run(gather_candidates_kernel, (rows, chunks), 4)
    run(draw_kernel, (rows,), 8)


def tensor_arguments(of: SamplingColumns | SamplingScratch) -> dict[str, Tensor]:
    """Return tensors as kernel arguments, named after their fields."""
    return {f"p_{field.name}": getattr(of, field.name) for field in fields(of)}


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    for vocabulary, bucket in ((32_000, 16), (152_064, 1), (262_144, 1)):
        of = f"{bucket} x {vocabulary:,}"
        yield f"greedy, {of}", partial(sampling_example, bucket, vocabulary, False)
        yield f"drawn with penalties, {of}", partial(sampling_example, bucket, vocabulary, True)


def sampling_example(bucket: int, vocabulary: int, drawn: bool) -> None:
    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    int64s, int32s, float32s = (empty(dtype, bucket) for dtype in (torch.int64, torch.int32, torch.float32))
    columns = SamplingColumns(*[int64s] * 2, *[int32s] * 5, *[float32s] * 6)
    logits = empty(torch.float32, bucket, vocabulary)
    history = TokenHistory(empty(torch.int32, bucket, 131_072), empty(torch.int32, bucket, vocabulary))
    biases = LogitBiases(empty(torch.int32, bucket, 1024), empty(torch.float32, bucket, 1024))
    scratch = SamplingScratch.allocate(bucket, vocabulary, logits.device)
    sample_tokens(
        logits, int64s, columns, scratch, any_random=drawn, penalties=(history, biases) if drawn else None
    )

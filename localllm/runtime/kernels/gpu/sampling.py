"""Logits to tokens, as `runtime/sampler.py` has it, in two or four kernels that no host waits for.

`peaks`: the largest logit of each chunk. `best`: of those, the token of a greedy row. For rows that are drawn:
`levels` writes x over the logits and finds how many tokens reach each of 32 levels and what they weigh; `gather`
lists the tokens from the level on that includes all that may be drawn; `pick` finds the thresholds in the list and
draws. Where the list cannot hold them `gather` measures 32 finer levels instead, and `pick` goes through the row.

Bytes a row: 4 of each token's logit for `peaks`, 8 for `levels`, which the L2 cache still holds, little else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import let_next_start, start, wait_for_inputs
from localllm.runtime.kernels.gpu.nucleus import (
    LEVELS,
    TOP,
    at_first,
    bracket,
    coarse_levels,
    fine_levels,
    limits,
    tally,
)
from localllm.runtime.kernels.gpu.penalties import Biases, History, mark, penalized
from localllm.runtime.kernels.gpu.pick import finish, pick_kernel, row_peak

# Arithmetic: 150 programs of 1,024 logits for a vocabulary of 152,064 are one wave of a large GPU.
CHUNK = 1024
CANDIDATES = 1024  # sorted in the registers of one program; four a thread
BLOCK = 2048  # of a row that one program goes through: eight a thread, loads of 128 bits
LANES = tl.constexpr(4)  # of `tally`: one a warp
PARTS = tl.constexpr(32)  # summed by one thread before it goes on


@dataclass(frozen=True)
class Columns:
    """What the rows of a bucket are drawn by: [B] on the device."""

    seed: Tensor  # int64
    position: Tensor  # int64, of the token to be drawn; one more after each draw
    live: Tensor  # int32, 0: the row is not read
    top_k: Tensor  # int32
    history: Tensor  # int32, its row of History, -1: none is needed
    answer: Tensor  # int32, position of the answer's first token
    last: Tensor  # int32, repeat_last_n
    temperature: Tensor  # float32, as all that follow
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True)
class Scratch:
    """What the kernels of one step tell each other of a bucket's rows."""

    peak: Tensor  # [B, chunks] float32, infinity for NaN
    peak_token: Tensor  # [B, chunks] int32
    counts: Tensor  # [B, LEVELS, chunks] int32, tokens of the chunk that reach a level
    masses: Tensor  # [B, chunks] int64, weight of the chunk
    level_counts: Tensor  # [B, 2, LEVELS] int32, of the row; the second ones are of the finer levels
    level_masses: Tensor  # [B, 2, LEVELS] int64
    listed: Tensor  # [B, CANDIDATES] float32, x in the order of the vocabulary
    listed_token: Tensor  # [B, CANDIDATES] int32

    @classmethod
    def of(cls, bucket: int, vocabulary: int, device: torch.device) -> "Scratch":
        chunks, levels = triton.cdiv(vocabulary, CHUNK), LEVELS.value

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(bucket, *shape, dtype=dtype, device=device)

        return cls(
            peak=empty(torch.float32, chunks),
            peak_token=empty(torch.int32, chunks),
            counts=empty(torch.int32, levels, chunks),
            masses=empty(torch.int64, chunks),
            level_counts=empty(torch.int32, 2, levels),
            level_masses=empty(torch.int64, 2, levels),
            listed=empty(torch.float32, CANDIDATES),
            listed_token=empty(torch.int32, CANDIDATES),
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
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
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
            logit = penalized(logit, mark, repetition, presence, tl.load(p_frequency + row))
            tl.store(p_logits + row * s_logits + i_token, logit, mask=mark != 0)
            tl.store(p_mark, 0, mask=mark != 0)
    logit = tl.where(logit != logit, float("inf"), logit)
    peak = tl.max(logit)
    at = row * tl.num_programs(1) + chunk
    tl.store(p_peak + at, peak)
    tl.store(p_peak_token + at, tl.min(tl.where(logit == peak, i_token, vocabulary)))
    if p_level_counts is not None:
        if chunk == 0:
            i_level = row * (2 * LEVELS) + tl.arange(0, 2 * LEVELS)
            tl.store(p_level_counts + i_level, 0)
            tl.store(p_level_masses + i_level, 0)


@triton.jit
def best_kernel(
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
    let_next_start(PDL)
    if tl.load(p_live + row) != 0:
        peak, token = row_peak(p_peak, p_peak_token, row, chunks, CHUNKS)
        finish(token, peak, p_choices, p_position, p_history, p_tokens, context, row)


@triton.jit
def add_levels(count, mass, p_level_counts, p_level_masses, at):
    i_level = at * LEVELS + tl.arange(0, LEVELS)
    tl.atomic_add(p_level_counts + i_level, count, sem="relaxed")
    tl.atomic_add(p_level_masses + i_level, mass, sem="relaxed")


@triton.jit
def tally_chunk(p_row, chunk, vocabulary, peak, temperature, level, CHUNK: tl.constexpr):
    """Writes x over the logits -> how many tokens of the chunk reach each level and what they weigh, [LEVELS]."""
    counts = tl.zeros([LANES, LEVELS], tl.int32)
    masses = tl.zeros([LANES, LEVELS], tl.int64)
    lane = tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for i in range(0, CHUNK, PARTS * LANES):
        i_token = chunk * CHUNK + i + lane
        m_token = (i + lane < CHUNK) & (i_token < vocabulary)
        logit = tl.load(p_row + i_token, mask=m_token, other=-float("inf"))
        # The largest logit becomes 0, so that no temperature above 0 overflows.
        x = tl.div_rn(logit - peak, temperature)
        tl.store(p_row + i_token, x, mask=m_token)
        count, mass = tally(x, level)
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
    let_next_start(PDL)
    temperature = tl.load(p_temperature + row)
    if (tl.load(p_live + row) == 0) | (temperature == 0):
        return
    peak, _ = row_peak(p_peak, p_peak_token, row, chunks, CHUNKS)
    if (peak == float("inf")) | (peak == -float("inf")):
        return
    x_row = p_logits + row * s_logits
    count, mass = tally_chunk(x_row, chunk, vocabulary, peak, temperature, coarse_levels(), CHUNK)
    i_level = tl.arange(0, LEVELS)
    tl.store(p_counts + (row * LEVELS + i_level) * chunks + chunk, count)
    tl.store(p_masses + row * chunks + chunk, tl.max(mass))
    add_levels(count, mass, p_level_counts, p_level_masses, 2 * row)


@triton.jit
def gather_kernel(
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
    let_next_start(PDL)
    if (tl.load(p_live + row) == 0) | (tl.load(p_temperature + row) == 0):
        return
    i_level = tl.arange(0, LEVELS)
    counts = tl.load(p_level_counts + 2 * row * LEVELS + i_level)
    masses = tl.load(p_level_masses + 2 * row * LEVELS + i_level)
    top_k, top_p, min_p = tl.load(p_top_k + row), tl.load(p_top_p + row), tl.load(p_min_p + row)
    top_k, sought, enough = limits(counts, masses, top_k, top_p, min_p)
    low, high = bracket(coarse_levels(), enough, TOP)
    x_row = p_logits + row * s_logits
    if at_first(counts, enough) <= CANDIDATES:
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
        # The row holds x already: it is measured as it is.
        count, mass = tally_chunk(x_row, chunk, vocabulary, 0.0, 1.0, fine_levels(low, high), CHUNK)
        add_levels(count, mass, p_level_counts, p_level_masses, 2 * row + 1)


def greedy(logits: Tensor, choices: Tensor, columns: Columns, scratch: Scratch, history: History | None) -> None:
    """Every row takes its likeliest token. logits: [B, vocab] float32; choices: [B] int64, written."""
    peaks(logits, columns, scratch, history, drawn=False)
    c = columns
    start(
        best_kernel,
        (len(logits),),
        warps=4,
        device=logits.device,
        p_choices=choices,
        p_live=c.live,
        p_position=c.position,
        p_history=c.history,
        p_tokens=history and history.tokens,
        context=history.tokens.shape[1] if history else 0,
        **of_peaks(scratch),
    )


def drawn(logits: Tensor, choices: Tensor, columns: Columns, scratch: Scratch, history: History | None) -> None:
    """Rows with a temperature above 0 are drawn. logits: as `greedy`, changed in place; choices: [B] int64, written."""
    peaks(logits, columns, scratch, history, drawn=True)
    c, s = columns, scratch
    rows, chunks = len(logits), s.peak.shape[1]
    row = {
        "device": logits.device,
        "p_logits": logits,
        "s_logits": logits.stride(0),
        "vocabulary": logits.shape[1],
        "p_live": c.live,
        "p_temperature": c.temperature,
        "p_level_counts": s.level_counts,
        "p_level_masses": s.level_masses,
        "CHUNK": CHUNK,
    }
    filters = {"p_top_k": c.top_k, "p_top_p": c.top_p, "p_min_p": c.min_p}
    listed = {"p_listed": s.listed, "p_listed_token": s.listed_token, "CANDIDATES": s.listed.shape[1]}
    of_levels = of_peaks(s) | {"p_counts": s.counts, "p_masses": s.masses}
    del of_levels["chunks"]
    start(levels_kernel, (rows, chunks), warps=LANES.value, **row, **of_levels)
    width = triton.next_power_of_2(chunks)
    start(gather_kernel, (rows, chunks), warps=4, **row, **filters, **listed, p_counts=s.counts, CHUNKS=width)
    start(
        pick_kernel,
        (rows,),
        warps=8,
        **row,
        **filters,
        **listed,
        **of_peaks(s),
        p_choices=choices,
        p_seed=c.seed,
        p_position=c.position,
        p_history=c.history,
        p_tokens=history and history.tokens,
        context=history.tokens.shape[1] if history else 0,
        p_masses=s.masses,
        BLOCK=BLOCK,
    )


def peaks(logits: Tensor, columns: Columns, scratch: Scratch, history: History | None, drawn: bool) -> None:
    c = columns
    start(
        peaks_kernel,
        (len(logits), scratch.peak.shape[1]),
        warps=4,
        device=logits.device,
        p_logits=logits,
        s_logits=logits.stride(0),
        vocabulary=logits.shape[1],
        p_live=c.live,
        p_history=c.history,
        p_repetition=c.repetition,
        p_presence=c.presence,
        p_frequency=c.frequency,
        p_marks=history and history.marks,
        p_peak=scratch.peak,
        p_peak_token=scratch.peak_token,
        p_level_counts=scratch.level_counts if drawn else None,
        p_level_masses=scratch.level_masses if drawn else None,
        LEVELS=LEVELS.value,
        CHUNK=CHUNK,
    )


def of_peaks(scratch: Scratch) -> dict[str, Any]:
    chunks = scratch.peak.shape[1]
    return {
        "p_peak": scratch.peak,
        "p_peak_token": scratch.peak_token,
        "chunks": chunks,
        "CHUNKS": triton.next_power_of_2(chunks),
    }


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    for vocabulary, bucket in ((32_000, 16), (152_064, 1), (262_144, 1)):
        yield f"greedy, {bucket} x {vocabulary:,}", lambda v=vocabulary, b=bucket: example(b, v, greedy, False)
        yield (
            f"drawn with penalties, {bucket} x {vocabulary:,}",
            lambda v=vocabulary, b=bucket: example(b, v, drawn, True),
        )


def example(bucket: int, vocabulary: int, launch: Callable[..., None], adjusted: bool) -> None:
    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    whole, short, real = (empty(dtype, bucket) for dtype in (torch.int64, torch.int32, torch.float32))
    columns = Columns(*[whole] * 2, *[short] * 5, *[real] * 6)
    logits = empty(torch.float32, bucket, vocabulary)
    history = None
    if adjusted:
        history = History(empty(torch.int32, bucket, 131_072), empty(torch.int32, bucket, vocabulary))
        biases = Biases(empty(torch.int32, bucket, 1024), empty(torch.float32, bucket, 1024))
        mark(logits, short, short, whole, short, short, history, biases)
    launch(logits, whole, columns, Scratch.of(bucket, vocabulary, logits.device), history)

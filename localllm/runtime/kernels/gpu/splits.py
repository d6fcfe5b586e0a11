"""Splits a context among programs, so that each one's share depends on a token's own position alone.

A context is cut into chunks of whole tiles, with as many tiles as needed for at most SPLITS chunks. Chunks begin
at multiples of their length, counted in positions; with a window they are assigned to programs in turn. The number
of tiles of a chunk follows from the token's position and the window, not from the batch or other tokens of its
sequence: if these need chunks of another length, a program iterates over both. So a draft token has the bits of
the same token decoded alone.

Each program writes the largest score, the sum of weights and the weighted sum of its chunk to a workspace;
`combine_kernel` combines the chunks in order.

Workspace: acc [tokens, heads, SPLITS, dim], max_score and total [tokens, heads, SPLITS], all float32, for the
new tokens of sequences that have few. If it would exceed MAX_WORKSPACE_BYTES, the sequences take turns in it.
"""

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportOperatorIssue=false

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.quant.packing import FLOAT32_BYTES, MAX_SPLITS, MAX_WORKSPACE_BYTES
from localllm.runtime.batch import Batch, upload_values
from localllm.runtime.kernels.gpu.launch import allow_next_kernel, gpu_of, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.paged import LOG2_E, MAX_DECODE_TOKENS, MIN_SCORE

PROGRAMS_PER_SM = 2  # per multiprocessor: one computes while the other loads keys
MIN_SPLITS = 4
COMBINE_COLUMNS = 64  # columns per program of `combine_kernel`: with 64 splits, 32 registers per thread


@dataclass(frozen=True)
class SplitWorkspace:
    """Results that programs leave for `combine_kernel`; in a captured graph, memory of the graph's own pool."""

    acc: Tensor
    max_score: Tensor
    total: Tensor

    @classmethod
    def allocate(cls, q: Tensor, tokens: int, heads: int, splits: int, dim: int) -> "SplitWorkspace":
        rows = tokens, heads, splits
        return cls(
            *(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*rows, dim), rows, rows))
        )


@dataclass(frozen=True)
class Turn:
    """Adjacent sequences that use the workspace together."""

    first: int  # sequence
    sequences: int
    first_token: int  # among the new tokens of all sequences that have few
    tokens: int


def turns(batch: Batch, heads: int, splits: int, dim: int) -> Iterator[Turn]:
    """Divide a step's sequences so that the tokens of each part fit in the workspace."""
    limit = max(MAX_DECODE_TOKENS, MAX_WORKSPACE_BYTES // (heads * splits * (dim + 2) * FLOAT32_BYTES))
    first = first_token = tokens = 0
    counts = few_token_counts(batch)
    for i, count in enumerate(counts):
        if tokens + count > limit:
            yield Turn(first, i - first, first_token, tokens)
            first, first_token, tokens = i, first_token + tokens, 0
        tokens += count
    if tokens:
        yield Turn(first, len(counts) - first, first_token, tokens)


def few_token_counts(batch: Batch) -> list[int]:
    """Return the number of new tokens per sequence; 0 if they are many, which need no workspace."""
    if batch.uniform_query_len is not None:  # a captured step has no spans
        counts = [batch.uniform_query_len] * len(batch.context_len)
    else:
        counts = [span.count for span in batch.spans]
    return [count if count <= MAX_DECODE_TOKENS else 0 for count in counts]


def workspace_rows(batch: Batch) -> Tensor:
    """Return the row of each sequence's first token among those of all turns, [B] int32 or longer."""
    if batch.max_query_len <= MAX_DECODE_TOKENS:
        return batch.query_start
    if not batch.workspace_rows:
        rows = [0, *accumulate(few_token_counts(batch))]
        batch.workspace_rows.append(upload_values(rows, torch.int32, batch.query_start.device))
    return batch.workspace_rows[0]


def choose_splits(q: Tensor, shares: int, tile: int, window: int = 0) -> int:
    """Return the number of splits. shares: programs that each sequence has without splitting.

    There are two programs per multiprocessor for a single sequence (estimated: two with 64 KB in flight each
    exceed bandwidth times latency), and the same for larger batches, so that a result does not depend on them. A
    window needs no more programs than there are tiles that the windows of a sequence's tokens touch.
    """
    splits = max(MIN_SPLITS, min(MAX_SPLITS, -(-PROGRAMS_PER_SM * gpu_of(q.device).multiprocessors // shares)))
    return min(splits, -(-(window + MAX_DECODE_TOKENS - 1) // tile) + 1) if window else splits


@triton.jit
def chunk_tiles(position, WINDOW: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """Return the number of tiles per chunk for a token at this position.

    With a window, any 16 adjacent tokens touch at most SPLITS chunks, wherever the window begins.
    """
    if WINDOW:
        seen = tl.minimum(tl.maximum(position, 0) + 1, WINDOW) + 15
        tiles = (seen + TILE * (SPLITS - 1) - 1) // (TILE * (SPLITS - 1))
    else:
        tiles = (position + TILE * SPLITS) // (TILE * SPLITS)
    return tiles


@triton.jit
def split_chunk(i_split, low, span, WINDOW: tl.constexpr, SPLITS: tl.constexpr):
    """Return the chunk of program i_split, among those from the first that position `low` attends to."""
    if WINDOW:
        first = tl.maximum(low - WINDOW + 1, 0) // span
        chunk = first + (i_split + SPLITS - first % SPLITS) % SPLITS
    else:
        chunk = i_split
    return chunk


@triton.jit(do_not_specialize=["first", "first_token"])
def combine_kernel(
    p_out,
    p_acc,
    p_most,
    p_total,
    p_start,
    p_context,
    p_row,
    p_sinks,
    p_gate,
    first,
    first_token,
    gate_token,
    gate_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = sum(weight * acc) / sum(weight * total), with one program per head, token and BLOCK_DIM columns."""
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    parts = tl.num_programs(0) // HEADS
    i_head = tl.program_id(0) // parts
    i_query = tl.program_id(1)
    i_sequence = first + tl.program_id(2)
    start = tl.load(p_start + i_sequence)
    count = tl.load(p_start + i_sequence + 1) - start
    if (i_query >= count) | (count > MOST_TOKENS):
        return
    position = tl.load(p_context + i_sequence) - count + i_query
    span = chunk_tiles(position, WINDOW, TILE, SPLITS) * TILE
    first_chunk = 0
    if WINDOW:
        first_chunk = tl.maximum(position - WINDOW + 1, 0) // span
    o_chunk = first_chunk + tl.arange(0, BLOCK_SPLITS)
    m_chunk = o_chunk * span <= position
    row = tl.load(p_row + i_sequence) - first_token + i_query
    o_row = (row.to(tl.int64) * HEADS + i_head) * SPLITS + o_chunk % SPLITS
    most = tl.load(p_most + o_row, mask=m_chunk, other=MIN_SCORE)
    sink = MIN_SCORE
    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head).to(tl.float32) * LOG2_E
    largest = tl.maximum(tl.max(most, 0), sink)
    weight = tl.where(m_chunk, tl.exp2(most - largest), 0.0)
    total = tl.sum(weight * tl.load(p_total + o_row, mask=m_chunk, other=0.0), 0)
    total += tl.exp2(sink - largest)  # 0 without sinks, but 1 for a padding row of a bucket, which has no context
    o_dim = tl.program_id(0) % parts * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    m_dim = o_dim < DIM
    acc = tl.load(p_acc + o_row[:, None] * DIM + o_dim, mask=m_chunk[:, None] & m_dim, other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / total
    token = (start + i_query).to(tl.int64)
    if p_gate is not None:
        gate = tl.load(p_gate + token * gate_token + i_head * gate_head + o_dim, mask=m_dim, other=0.0)
        out = out / (1 + tl.exp2(-gate.to(tl.float32) * LOG2_E))
    tl.store(p_out + (token * HEADS + i_head) * DIM + o_dim, out.to(p_out.dtype.element_ty), mask=m_dim)


def combine_splits(
    out: Tensor,
    space: SplitWorkspace,
    batch: Batch,
    turn: Turn,
    queries: int,
    window: int,
    tile: int,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Combine the chunks of a turn into out [T, heads, dim].

    queries: maximum number of new tokens of a sequence; gate: of the shape of out, or None
    """
    _, heads, splits, dim = space.acc.shape
    columns = min(COMBINE_COLUMNS, triton.next_power_of_2(dim))
    launch_kernel(
        combine_kernel,
        (heads * triton.cdiv(dim, columns), queries, turn.sequences),
        warps=4,
        device=out.device,
        contract=False,
        p_out=out,
        p_acc=space.acc,
        p_most=space.max_score,
        p_total=space.total,
        p_start=batch.query_start,
        p_context=batch.context_len,
        p_row=workspace_rows(batch),
        p_sinks=sinks,
        p_gate=gate,
        first=turn.first,
        first_token=turn.first_token,
        gate_token=0 if gate is None else gate.stride(0),
        gate_head=0 if gate is None else gate.stride(1),
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=columns,
        WINDOW=window,
        TILE=tile,
        SPLITS=splits,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        MOST_TOKENS=MAX_DECODE_TOKENS,
    )

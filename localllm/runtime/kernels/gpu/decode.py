"""softmax(q k^T * scale) v where sequences have few new tokens, with the context split among programs.

q: [T, heads, head_dim]; k, v: [slots, kv_heads, head_dim], quantized with a scale per vector. A program processes
one chunk of a sequence's context for 16 rows of one key head: its query heads, token by token. Tensor cores
multiply at least 16 rows, so that up to 16 take the time of one, and the cache is read once for all of them. More
tokens need more programs that read the same chunk; they are adjacent in the grid, so that all but the first hit
the L2 cache. The tile does not change, and neither do the bits of each row.

On GPUs from sm_90 on, a program prefetches the first tile of its chunk into L2 before it waits for the kernel that
rotates the queries. For that it reads lengths and block table, which are results of kernels before that one.

Bytes: 2 * context * kv_heads * head_dim * itemsize (in 8 bits 2 more per vector, in 4 bits 4) are read, and for
each chunk heads * (head_dim + 2) * 4 are written and read again (splits.py): an eighth of the bytes of a 16-bit
chunk with 4 heads per key head and the minimum length of 64, and less for longer contexts.
"""

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportArgumentType=false, reportAssignmentType=false

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.quant.packing import MAX_HEAD_BYTES
from localllm.quant.vectors import INT4, KV_DTYPES, KVDtype
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_of,
    gpu_unsupported,
    launch_kernel,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.paged import (
    EXAMPLE_CONTEXT,
    FORM_INT4,
    FORM_PLAIN,
    MAX_DECODE_TOKENS,
    META_DEVICE,
    MIN_SCORE,
    attend_tile,
    block_table_slots,
    cache_form,
    load_queries,
    meta_batch,
    scale_words,
    score_units,
    store_output,
    zero_accumulator,
)
from localllm.runtime.kernels.gpu.small_m import L2_LINE_BYTES, prefetch_l2
from localllm.runtime.kernels.gpu.splits import (
    SplitWorkspace,
    Turn,
    choose_splits,
    chunk_tiles,
    combine_splits,
    split_chunk,
    turns,
    workspace_rows,
)
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kv_cache.tensors import KVCache


@triton.jit
def prefetch_tile(
    p_k,
    p_v,
    p_table,
    p_start,
    p_context,
    i_sequence,
    i_head,
    i_row,
    i_split,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Prefetch the first tile of a program's chunk into L2, except for keys that the step itself appends."""
    LINE: tl.constexpr = L2_LINE_BYTES * 8 // p_k.dtype.element_ty.primitive_bitwidth  # elements
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH + LINE - 1) // LINE)
    before = tl.load(p_context + i_sequence) - (tl.load(p_start + i_sequence + 1) - tl.load(p_start + i_sequence))
    low = before + i_row // GROUP
    span = chunk_tiles(low, WINDOW, TILE, SPLITS) * TILE
    begin = split_chunk(i_split, low, span, WINDOW, SPLITS) * span
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(low - WINDOW + 1, 0) // TILE * TILE)
    if begin < before:
        o_at = tl.minimum(begin + tl.arange(0, TILE), before - 1)
        slot = block_table_slots(p_table + i_sequence * table_row, o_at, o_at >= 0, BLOCK)
        o_line = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
        o_line = ((slot * KV_HEADS + i_head) * WIDTH)[:, None] + o_line[None, :]
        prefetch_l2(p_k + o_line)
        prefetch_l2(p_v + o_line)


@triton.jit(do_not_specialize=["first", "first_token", "table_row"])
def decode_kernel(
    p_q,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_acc,
    p_most,
    p_total,
    p_table,
    p_start,
    p_context,
    p_row,
    first,
    first_token,
    q_token,
    q_head,
    table_row,
    unit,
    bend,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    BENT: tl.constexpr,
    FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tiles = tl.num_programs(0) // KV_HEADS
    i_head = tl.program_id(0) // row_tiles
    i_row = tl.program_id(0) % row_tiles * ROWS
    i_split = tl.program_id(1)
    i_sequence = first + tl.program_id(2)
    if PDL:
        prefetch_tile(
            p_k, p_v, p_table, p_start, p_context, i_sequence, i_head, i_row, i_split, table_row,
            KV_HEADS, GROUP, WIDTH, TILE, SPLITS, BLOCK, WINDOW,
        )  # fmt: skip
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    first_row = tl.load(p_row + i_sequence) - first_token  # before the loop, which has no register to spare
    start = tl.load(p_start + i_sequence)
    count = tl.load(p_start + i_sequence + 1) - start
    before = tl.load(p_context + i_sequence) - count  # tokens
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < count * GROUP
    o_query = o_row // GROUP
    o_head = i_head * GROUP + o_row % GROUP
    position = before + o_query
    low = before + i_row // GROUP
    high = before + tl.minimum((i_row + ROWS - 1) // GROUP, count - 1)
    leave = (i_row >= count * GROUP) | (count > MOST_TOKENS) | (high < 0)
    if WINDOW == 0:
        leave |= high < i_split * TILE
    if leave:
        return
    o_q = (start + o_query).to(tl.int64) * q_token + o_head * q_head
    q, q_odd = load_queries(p_q, o_q, m_row, DIM, BLOCK_WIDTH, FORM)
    p_table += i_sequence * table_row
    for tiles in range(chunk_tiles(low, WINDOW, TILE, SPLITS), chunk_tiles(high, WINDOW, TILE, SPLITS) + 1):
        span = tiles * TILE
        chunk = split_chunk(i_split, low, span, WINDOW, SPLITS)
        begin = chunk * span
        end = tl.minimum(begin + span, high + 1)
        if WINDOW:
            begin = tl.maximum(begin, tl.maximum(low - WINDOW + 1, 0) // TILE * TILE)
        most = tl.full([ROWS], MIN_SCORE, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc, acc_odd = zero_accumulator(ROWS, BLOCK_WIDTH, FORM)
        for at in range(begin, end, TILE):
            acc, acc_odd, most, total = attend_tile(
                at,
                q,
                q_odd,
                acc,
                acc_odd,
                most,
                total,
                position,
                low,
                high,
                i_head,
                p_k,
                p_v,
                p_k_scale,
                p_v_scale,
                p_table,
                unit,
                bend,
                KV_HEADS,
                WIDTH,
                BLOCK_WIDTH,
                TILE,
                BLOCK,
                WINDOW,
                BENT,
                FORM,
                VALUE_FORM,
                True,
            )
        if begin < end:
            m_own = m_row & (chunk_tiles(position, WINDOW, TILE, SPLITS) == tiles)
            o_space = (first_row + o_query).to(tl.int64) * (KV_HEADS * GROUP) + o_head
            o_space = o_space * SPLITS + chunk % SPLITS
            tl.store(p_most + o_space, most, mask=m_own)
            tl.store(p_total + o_space, total, mask=m_own)
            store_output(p_acc, o_space * DIM, m_own, acc, acc_odd, DIM, BLOCK_WIDTH, FORM)


def tile_rows(group: int) -> int:
    """Rows of a tile: 16, or a power of two that holds a token's query heads, up to 32."""
    return max(16, min(32, triton.next_power_of_2(group)))


def is_wide(q: Tensor) -> bool:
    """Return whether the sums of a program's heads nearly fill its registers."""
    return triton.next_power_of_2(q.shape[-1]) * q.element_size() > 512


def choose_tile(q: Tensor, form: int) -> tuple[int, int, int]:
    """Return keys per tile, warps and stages of a program.

    Estimated, not measured: a tile's keys and values are 32 KB for up to 256 bytes per head, about bandwidth times
    latency of a multiprocessor, which runs two programs or more. Rows of 1 KB and their sums are split among more
    warps to fit in registers. The block table is read one stage ahead of the keys, so that 3 stages keep one tile
    in flight and 5 keep two.
    """
    width = triton.next_power_of_2(q.shape[-1]) * q.element_size()
    if is_wide(q):
        return 32, 8, 3
    gpu = gpu_of(q.device)
    if gpu.amd_arch.startswith("gfx1"):  # RDNA holds operands of products twice in registers; this spills least
        return 32, 8, 2
    narrow = gpu.small_shared and form == FORM_PLAIN.value
    return 64 if width <= 256 else 32, 4, 3 if narrow else 5


def launch_decode(
    out: Tensor,
    q: Tensor,
    cache: KVCache,
    batch: Batch,
    c: AttentionConfig,
    queries: int,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Write the results of sequences with at most MAX_DECODE_TOKENS new tokens, of which there are up to
    `queries`.

    out, q, gate: [T, heads, head_dim]; with a gate, each result is multiplied by its sigmoid.
    """
    tile, _, _ = choose_tile(q, cache_form(cache.k)[1])
    splits = choose_splits(q, c.kv_heads, tile, c.window or 0)
    for turn in turns(batch, c.heads, splits, c.head_dim):
        space = SplitWorkspace.allocate(q, turn.tokens, c.heads, splits, c.head_dim)
        launch_turn(space, q, cache, batch, c, queries, turn)
        combine_splits(out, space, batch, turn, queries, c.window or 0, tile, sinks, gate)


def launch_turn(
    space: SplitWorkspace, q: Tensor, cache: KVCache, batch: Batch, c: AttentionConfig, queries: int, turn: Turn
) -> None:
    """Write the chunks of some sequences to the workspace."""
    group, rows = c.heads // c.kv_heads, tile_rows(c.heads // c.kv_heads)
    _, warps, stages = choose_tile(q, cache_form(cache.k)[1])
    launch_kernel(
        decode_kernel,
        (c.kv_heads * triton.cdiv(queries * group, rows), space.total.shape[2], turn.sequences),
        warps=warps,
        stages=stages,
        device=q.device,
        contract=is_wide(q),  # others have the bits of rope_decode.py
        p_q=q,
        p_row=workspace_rows(batch),
        first=turn.first,
        first_token=turn.first_token,
        q_token=q.stride(0),
        q_head=q.stride(1),
        MOST_TOKENS=MAX_DECODE_TOKENS,
        **score_arguments(space, q, cache, batch, c),
    )


def score_arguments(
    space: SplitWorkspace, q: Tensor, cache: KVCache, batch: Batch, c: AttentionConfig
) -> dict[str, Any]:
    """Return the arguments of a kernel that writes chunks to the workspace, except queries and sequences."""
    group = c.heads // c.kv_heads
    (k, form), (v, value_form) = cache_form(cache.k), cache_form(cache.v)
    width = k.shape[-1]  # in elements, or pairs of them
    unit, bend = score_units(c.scale, c.softcap)
    # Triton 3.6 may give each of four threads 8 columns of 4-bit keys, also where there are only 16.
    narrowest = 32 if form == FORM_INT4.value else 16
    return {
        "p_k": k,
        "p_v": v,
        "p_k_scale": scale_words(cache.k_scale),
        "p_v_scale": scale_words(cache.v_scale),
        "p_acc": space.acc,
        "p_most": space.max_score,
        "p_total": space.total,
        "p_table": batch.block_table,
        "p_start": batch.query_start,
        "p_context": batch.context_len,
        "table_row": batch.block_table.stride(0),
        "unit": unit,
        "bend": bend,
        "KV_HEADS": c.kv_heads,
        "GROUP": group,
        "DIM": c.head_dim,
        "WIDTH": width,
        "BLOCK_WIDTH": max(narrowest, triton.next_power_of_2(width)),
        "ROWS": tile_rows(group),
        "TILE": choose_tile(q, form)[0],
        "SPLITS": space.total.shape[2],
        "BLOCK": batch.block_size,
        "WINDOW": c.window or 0,
        "BENT": bool(c.softcap),
        "FORM": form,
        "VALUE_FORM": value_form,
    }


def attention_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if reason := gpu_unsupported(q):
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"queries are in {q.dtype}"
    if cache.k_scale is not None and config.head_dim % 2:
        return f"a quantized cache is read in pairs, but heads have {config.head_dim} dimensions"
    if config.head_dim * q.element_size() > MAX_HEAD_BYTES:
        return f"heads have more than {MAX_HEAD_BYTES} bytes"
    if config.scale <= 0:
        return "the scale is not positive"
    return None


def decode_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if batch.max_query_len > MAX_DECODE_TOKENS:
        return f"a sequence has more than {MAX_DECODE_TOKENS} new tokens"
    return attention_unsupported(q, cache, batch, config, sinks)


@kernel("attention", "triton-decode", decode_unsupported, first=True)
def attention_decode(
    q: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    sinks: Tensor | None,
    gate: Tensor | None = None,
) -> Tensor:
    out = q.new_empty(q.shape)
    launch_decode(out, q, cache, batch, config, batch.max_query_len, sinks, gate)
    return out


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, c, form, queries in (
        ("Llama 3 8B", AttentionConfig(32, 8, 128, None, 0.1), torch.bfloat16, 1),
        ("Llama 3 8B, 8 tokens", AttentionConfig(32, 8, 128, None, 0.1), torch.bfloat16, 8),
        ("Llama 3 8B, INT8 cache", AttentionConfig(32, 8, 128, None, 0.1), torch.int8, 1),
        ("Llama 3 8B, FP8 cache", AttentionConfig(32, 8, 128, None, 0.1), torch.float8_e4m3fn, 1),
        ("Llama 3 8B, K8V4 cache", AttentionConfig(32, 8, 128, None, 0.1), KV_DTYPES["k8v4"], 1),
        ("Llama 3 8B, INT4 cache", AttentionConfig(32, 8, 128, None, 0.1), INT4, 1),
        ("gpt-oss 20B", AttentionConfig(64, 8, 64, None, 0.1, window=128, sinks=True), torch.bfloat16, 1),
        ("Gemma 2 9B", AttentionConfig(16, 8, 256, None, 0.1, window=4096, softcap=50.0), torch.bfloat16, 1),
        ("Gemma 4, whole layers", AttentionConfig(16, 2, 512, None, 0.1), torch.bfloat16, 1),
        ("Gemma 4, whole layers, FP8 cache", AttentionConfig(16, 2, 512, None, 0.1), torch.float8_e4m3fn, 1),
        ("Gemma 4, whole layers, INT4 cache", AttentionConfig(16, 2, 512, None, 0.1), INT4, 1),
    ):
        yield name, attention_example(c, form, 1, queries)


def attention_example(c: AttentionConfig, form: KVDtype, sequences: int, queries: int) -> Callable[[], object]:
    """Return a call of `attention` in bfloat16 for sequences with `queries` new tokens each."""

    def call() -> Tensor:
        batch = meta_batch(sequences, queries)
        cache = KVCache(EXAMPLE_CONTEXT // 16, 16, c.kv_heads, c.head_dim, form, META_DEVICE)
        q = torch.empty(sequences * queries, c.heads, c.head_dim, dtype=torch.bfloat16, device=META_DEVICE)
        sinks = torch.empty(c.heads, dtype=torch.bfloat16, device=META_DEVICE) if c.sinks else None
        return choose("attention", q, cache, batch, c, sinks).run(q, cache, batch, c, sinks)

    return call

"""softmax(q k^T * scale) v where sequences have many new tokens (FlashAttention-2, Dao 2023), in one launch for
all.

q: [T, heads, head_dim]; k, v: [slots, kv_heads, head_dim], in 8 bits with a scale per vector. A program processes
ROWS rows of one key head of one sequence, its query heads token by token, and iterates over all tiles of keys that
they attend to; only tiles at the causal or window boundary are masked. Any number of query heads shares a tile, so
that keys are read once for them and the masked boundary is short. Tiles of keys begin at multiples of their
length, so that a token has the same bits however its prompt was cut into chunks.

Sequences with few new tokens are left to the kernel that splits the context, each by its own count: a token's
bits do not depend on the new tokens of other sequences.

Multiplications: 4 * head_dim * heads per token and visible token. Bytes of keys and values: 2 * head_dim *
itemsize * context for every ROWS rows, most of them from the L2 cache.
"""

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.quant.vectors import INT4, KV_DTYPES
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.decode import attention_example, attention_unsupported, launch_decode
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_of,
    launch_kernel,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.paged import (
    FORM_INT4,
    FORM_PLAIN,
    LOG2_E,
    MAX_DECODE_TOKENS,
    MIN_SCORE,
    attend_tile,
    cache_form,
    load_queries,
    scale_words,
    score_units,
    store_output,
    zero_accumulator,
)
from localllm.runtime.kernels.registry import kernel
from localllm.runtime.kv_cache.tensors import KVCache


@triton.jit(do_not_specialize=["sequences", "table_row"])
def prefill_kernel(
    p_out,
    p_q,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_table,
    p_start,
    p_context,
    p_sinks,
    p_gate,
    sequences,
    q_token,
    q_head,
    gate_token,
    gate_head,
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
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    BENT: tl.constexpr,
    FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr,
    FEWEST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    # The last tokens attend to the most keys: their programs start first, so that short ones fill the end.
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_head = tl.program_id(1)
    # Sequence i has the tiles from start * GROUP // ROWS + i on, at most one of them unused.
    i_sequence = -1
    for at in range(0, sequences, 32):
        o_sequence = at + tl.arange(0, 32)
        m_sequence = o_sequence < sequences
        first_tile = tl.load(p_start + o_sequence, mask=m_sequence, other=0) * GROUP // ROWS + o_sequence
        i_sequence += tl.sum((m_sequence & (first_tile <= i_tile)).to(tl.int32), 0)
    start = tl.load(p_start + i_sequence)
    count = tl.load(p_start + i_sequence + 1) - start
    i_row = (i_tile - start * GROUP // ROWS - i_sequence) * ROWS
    if (i_row >= count * GROUP) | (count < FEWEST):
        return
    before = tl.load(p_context + i_sequence) - count
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < count * GROUP
    o_token = (start + o_row // GROUP).to(tl.int64)
    o_head = i_head * GROUP + o_row % GROUP
    position = before + o_row // GROUP
    low = before + i_row // GROUP
    high = before + tl.minimum((i_row + ROWS - 1) // GROUP, count - 1)
    q, q_odd = load_queries(p_q, o_token * q_token + o_head * q_head, m_row, DIM, BLOCK_WIDTH, FORM)
    if p_sinks is None:
        most = tl.full([ROWS], MIN_SCORE, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    else:  # acts like a logit that came before all others
        most = tl.load(p_sinks + o_head).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    acc, acc_odd = zero_accumulator(ROWS, BLOCK_WIDTH, FORM)
    p_table += i_sequence * table_row
    # Every row attends to all keys from `inner` up to `edge`.
    first = 0
    inner = 0
    if WINDOW:
        first = tl.maximum(low - WINDOW + 1, 0) // TILE * TILE
        inner = tl.maximum(high - WINDOW + TILE, 0) // TILE * TILE
    edge = tl.maximum((low + 1) // TILE * TILE, first)
    inner = tl.minimum(inner, edge)
    for PART in tl.static_range(0 if WINDOW else 1, 3):
        begin, end = inner, edge
        if PART == 0:
            begin, end = first, inner
        if PART == 2:
            begin, end = edge, high + 1
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
                PART != 1,
            )
    over = 1 / tl.where(m_row, total, 1.0)
    acc *= over[:, None]
    if FORM != FORM_PLAIN:
        acc_odd *= over[:, None]
    if p_gate is not None:
        o_gate = o_token * gate_token + o_head * gate_head
        gate, gate_odd = load_queries(p_gate, o_gate, m_row, DIM, BLOCK_WIDTH, FORM)
        acc = acc / (1 + tl.exp2(-gate.to(tl.float32) * LOG2_E))
        if FORM != FORM_PLAIN:
            acc_odd = acc_odd / (1 + tl.exp2(-gate_odd.to(tl.float32) * LOG2_E))
    o_out = (o_token * (KV_HEADS * GROUP) + o_head) * DIM
    store_output(p_out, o_out, m_row, acc, acc_odd, DIM, BLOCK_WIDTH, FORM)


def choose_tiles(q: Tensor, form: int) -> tuple[int, int, int, int]:
    """Return rows, keys, warps and stages of a program. form: of values

    Estimated: with 128 rows, each value that is read serves 128 multiplications, and the 16 rows of a warp, the
    minimum for tensor cores, have 64 registers of sums at 128 dimensions. If operands are read from shared memory
    (sm_90, sm_100), there are as many keys as registers can hold scores for; if they pass through registers, half
    as many. The columns of wider heads are split among warps, which Triton does if there are more keys than rows.
    All compile without spilling.
    """
    width = triton.next_power_of_2(q.shape[-1])
    gpu = gpu_of(q.device)
    plain, four_bit = form == FORM_PLAIN.value, form == FORM_INT4.value
    if q.dtype == torch.float32:  # products without tensor cores
        return 32, 32 if width <= 128 else 16, 8, 1
    if width > 256:
        return 16, 32, 8, 3
    if gpu.arch in (90, 100):
        # On sm_100, 64 keys in 8 bits spill with Triton 3.6. In 4 bits, 64 spill on sm_90, 32 on sm_80 and sm_100.
        keys = 64 if plain or gpu.arch == 90 else 32
        return 128, (keys // 2 if four_bit else keys) if width <= 128 else 32, 8, 3
    if width > 128:
        return 32, 32 if gpu.amd_arch else 64, 8, 3
    if width > 64:
        return 128, 32 if plain or not (gpu.small_shared or four_bit) else 16, 8, 3
    return 128, 64 if plain else 32, 8, 3


def launch_prefill(
    out: Tensor,
    q: Tensor,
    cache: KVCache,
    batch: Batch,
    c: AttentionConfig,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Write the results of the sequences with more than MAX_DECODE_TOKENS new tokens to `out`.

    out, q, gate: [T, heads, head_dim]
    """
    sequences, group = len(batch.context_len), c.heads // c.kv_heads
    (k, form), (v, value_form) = cache_form(cache.k), cache_form(cache.v)
    rows, tile, warps, stages = choose_tiles(q, value_form)
    width = k.shape[-1]  # in elements, or pairs of them
    unit, bend = score_units(c.scale, c.softcap)
    launch_kernel(
        prefill_kernel,
        (len(q) * group // rows + sequences, c.kv_heads),
        warps=warps,
        stages=stages,
        device=q.device,
        p_out=out,
        p_q=q,
        p_k=k,
        p_v=v,
        p_k_scale=scale_words(cache.k_scale),
        p_v_scale=scale_words(cache.v_scale),
        p_table=batch.block_table,
        p_start=batch.query_start,
        p_context=batch.context_len,
        p_sinks=sinks,
        p_gate=gate,
        sequences=sequences,
        q_token=q.stride(0),
        q_head=q.stride(1),
        gate_token=0 if gate is None else gate.stride(0),
        gate_head=0 if gate is None else gate.stride(1),
        table_row=batch.block_table.stride(0),
        unit=unit,
        bend=bend,
        KV_HEADS=c.kv_heads,
        GROUP=group,
        DIM=c.head_dim,
        WIDTH=width,
        BLOCK_WIDTH=max(16, triton.next_power_of_2(width)),
        ROWS=rows,
        TILE=tile,
        BLOCK=batch.block_size,
        WINDOW=c.window or 0,
        BENT=bool(c.softcap),
        FORM=form,
        VALUE_FORM=value_form,
        FEWEST=MAX_DECODE_TOKENS + 1,
    )


def prefill_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if batch.max_query_len <= MAX_DECODE_TOKENS:
        return f"no sequence has more than {MAX_DECODE_TOKENS} new tokens"
    return attention_unsupported(q, cache, batch, config, sinks)


@kernel("attention", "triton-prefill", prefill_unsupported, first=True)
def attention_prefill(
    q: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    sinks: Tensor | None,
    gate: Tensor | None = None,
) -> Tensor:
    out = q.new_empty(q.shape)
    launch_prefill(out, q, cache, batch, config, sinks, gate)
    if batch.uniform_query_len is None:  # never in a captured step, so that the host may read the spans
        queries = max((span.count for span in batch.spans if span.count <= MAX_DECODE_TOKENS), default=0)
        if queries:
            launch_decode(out, q, cache, batch, config, queries, sinks, gate)
    return out


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, c, form in (
        ("Llama 3 8B", AttentionConfig(32, 8, 128, None, 0.1), torch.bfloat16),
        ("Llama 3 8B, INT8 cache", AttentionConfig(32, 8, 128, None, 0.1), torch.int8),
        ("Llama 3 8B, FP8 cache", AttentionConfig(32, 8, 128, None, 0.1), torch.float8_e4m3fn),
        ("Llama 3 8B, K8V4 cache", AttentionConfig(32, 8, 128, None, 0.1), KV_DTYPES["k8v4"]),
        ("Llama 3 8B, INT4 cache", AttentionConfig(32, 8, 128, None, 0.1), INT4),
        ("gpt-oss 20B", AttentionConfig(64, 8, 64, None, 0.1, window=128, sinks=True), torch.bfloat16),
        ("Gemma 2 9B", AttentionConfig(16, 8, 256, None, 0.1, window=4096, softcap=50.0), torch.bfloat16),
        ("Gemma 4, whole layers", AttentionConfig(16, 2, 512, None, 0.1), torch.bfloat16),
    ):
        yield name, attention_example(c, form, 1, 2048)

"""Latent attention where sequences have few new tokens: the absorbed form (kernels/latent.py), with a split
context.

q: [T, heads, nope_dim + rope_dim]; cache: [slots, rank + rope_dim], in 8 bits with two scales each. k_b turns the
first part of q into a query for latents; all heads then attend to the cached rows as to the keys of one key head,
whose values are their first `rank` columns, and v_b turns the weighted sums into values. A tile of rows is read
once for both. A program processes one chunk of the context for ROWS rows: the heads of one token after another.

Bytes: context * (rank + rope_dim) * itemsize (in 8 bits 4 more per token), k_b and v_b, and for each chunk heads *
(rank + 2) * 4 written and read again (splits.py). With many heads, multiplications cost as much as bytes: 2 *
heads * (2 * rank + rope_dim) for each visible token.
"""

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportArgumentType=false

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportArgumentType=false
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import LatentConfig, RopeConfig
from localllm.quant.packing import MAX_HEAD_BYTES
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.launch import (
    Gpu,
    allow_next_kernel,
    dot,
    gpu_of,
    gpu_unsupported,
    launch_kernel,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.paged import (
    EXAMPLE_CONTEXT,
    FORM_PLAIN,
    MAX_DECODE_TOKENS,
    META_DEVICE,
    MIN_SCORE,
    block_table_slots,
    cache_form,
    load_queries,
    load_rows,
    meta_batch,
    online_softmax,
    score_units,
    split_pairs,
    store_output,
    zero_accumulator,
)
from localllm.runtime.kernels.gpu.splits import (
    SplitWorkspace,
    Turn,
    choose_splits,
    chunk_tiles,
    combine_splits,
    turns,
    workspace_rows,
)
from localllm.runtime.kernels.registry import kernel
from localllm.runtime.kv_cache.tensors import LatentCache


@triton.jit(do_not_specialize=["tokens"])
def per_head_matmul_kernel(
    p_out,
    p_x,
    p_w,
    tokens,
    x_token,
    x_head,
    HEADS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    OUT_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply per head for few tokens: out[t, h] = x[t, h] W[h].

    x: [T, heads, in]; W: [heads, in, out], or [heads, out, in] if OUT_FIRST. A program processes 16 tokens, the
    minimum for tensor cores, so that a token's result depends neither on their number nor on the others. It reads
    heads * in * out * itemsize bytes for every 16 tokens.
    """
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    i_head = tl.program_id(1)
    o_token = tl.program_id(2) * 16 + tl.arange(0, 16)
    m_token = o_token < tokens
    o_out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = o_out < OUT
    p_w += i_head.to(tl.int64) * (IN * OUT)
    p_x += i_head * x_head
    acc = tl.zeros([16, BLOCK_OUT], tl.float32)
    for at in range(0, IN, BLOCK_IN):
        o_in = at + tl.arange(0, BLOCK_IN)
        m_in = o_in < IN
        o_x = o_token.to(tl.int64) * x_token
        x = tl.load(p_x + o_x[:, None] + o_in[None, :], mask=m_token[:, None] & m_in[None, :], other=0.0)
        if OUT_FIRST:
            o_w = o_out[:, None] * IN + o_in[None, :]
            w = tl.trans(tl.load(p_w + o_w, mask=m_out[:, None] & m_in[None, :], other=0.0))
        else:
            o_w = o_in[:, None] * OUT + o_out[None, :]
            w = tl.load(p_w + o_w, mask=m_in[:, None] & m_out[None, :], other=0.0)
        acc = dot(x, w, acc)
    o_row = (o_token.to(tl.int64) * HEADS + i_head) * OUT
    m_row = m_token[:, None] & m_out[None, :]
    tl.store(p_out + o_row[:, None] + o_out[None, :], acc.to(p_out.dtype.element_ty), mask=m_row)


def per_head_matmul(x: Tensor, w: Tensor, *, out_first: bool) -> Tensor:
    """Multiply per head. Returns [T, heads, out].

    x: [T, heads, in], its last dimension dense; w: [heads, in, out], or [heads, out, in] if out_first. With 64
    columns per program, 16 heads of 512 make 128 programs.
    """
    size = w.shape[1] if out_first else w.shape[2]
    out = x.new_empty(*x.shape[:2], size)
    launch_kernel(
        per_head_matmul_kernel,
        (triton.cdiv(size, 64), x.shape[1], triton.cdiv(len(x), 16)),
        warps=4,
        stages=3,
        device=x.device,
        p_out=out,
        p_x=x,
        p_w=w,
        tokens=len(x),
        x_token=x.stride(0),
        x_head=x.stride(1),
        HEADS=x.shape[1],
        IN=x.shape[2],
        OUT=size,
        BLOCK_IN=64,
        BLOCK_OUT=64,
        OUT_FIRST=out_first,
    )
    return out


@triton.jit(do_not_specialize=["first", "first_token", "table_row"])
def mla_kernel(
    p_q,
    p_turned,
    p_rows,
    p_scale,
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
    turned_token,
    turned_head,
    table_row,
    unit,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one chunk of latents. q: for latents, [T, HEADS, RANK]; turned: the rotated part, [T, HEADS,
    ROPE]; PAIR: elements per element read (2 in 8 bits); BLOCK_RANK, BLOCK_ROPE: elements read, padded to powers
    of two.
    """
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    i_row = tl.program_id(0) * ROWS
    i_split = tl.program_id(1)
    i_sequence = first + tl.program_id(2)
    first_row = tl.load(p_row + i_sequence) - first_token  # before the loop, which has no register to spare
    start = tl.load(p_start + i_sequence)
    count = tl.load(p_start + i_sequence + 1) - start
    before = tl.load(p_context + i_sequence) - count
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < count * HEADS
    o_query = o_row // HEADS
    o_head = o_row % HEADS
    position = before + o_query
    low = before + i_row // HEADS
    high = before + tl.minimum((i_row + ROWS - 1) // HEADS, count - 1)
    if (i_row >= count * HEADS) | (high < i_split * TILE):
        return
    o_token = (start + o_query).to(tl.int64)
    q, q_odd = load_queries(p_q, o_token * q_token + o_head * q_head, m_row, RANK, BLOCK_RANK, FORM)
    o_turned = o_token * turned_token + o_head * turned_head
    turned, turned_odd = load_queries(p_turned, o_turned, m_row, ROPE, BLOCK_ROPE, FORM)
    p_table += i_sequence * table_row
    for tiles in range(chunk_tiles(low, 0, TILE, SPLITS), chunk_tiles(high, 0, TILE, SPLITS) + 1):
        span = tiles * TILE
        begin = i_split * span
        end = tl.minimum(begin + span, high + 1)
        most = tl.full([ROWS], MIN_SCORE, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc, acc_odd = zero_accumulator(ROWS, BLOCK_RANK, FORM)
        for at in range(begin, end, TILE):
            o_at = at + tl.arange(0, TILE)
            m_at = o_at <= high
            slot = block_table_slots(p_table, o_at, m_at, BLOCK)
            o_vector = slot * ((RANK + ROPE) // PAIR)
            latent = load_rows(p_rows, o_vector, m_at, RANK // PAIR, BLOCK_RANK, True)
            key = load_rows(p_rows + RANK // PAIR, o_vector, m_at, ROPE // PAIR, BLOCK_ROPE, True)
            score = tl.zeros([ROWS, TILE], tl.float32)
            if FORM == FORM_PLAIN:
                score = dot(turned, tl.trans(key), dot(q, tl.trans(latent), score))
                latent_odd, scale = latent, 1.0  # not used
            else:
                scale = tl.load(p_scale + 2 * slot, mask=m_at, other=0.0).to(tl.float32)[None, :]
                key_scale = tl.load(p_scale + 2 * slot + 1, mask=m_at, other=0.0).to(tl.float32)[None, :]
                latent, latent_odd = split_pairs(latent, FORM, q.dtype)
                key, key_odd = split_pairs(key, FORM, q.dtype)
                score = dot(turned_odd, tl.trans(key_odd), dot(turned, tl.trans(key), score)) * key_scale
                nope = tl.zeros([ROWS, TILE], tl.float32)
                score += dot(q_odd, tl.trans(latent_odd), dot(q, tl.trans(latent), nope)) * scale
            score = tl.where(o_at[None, :] <= position[:, None], score, float("-inf"))
            weight, fading, most, total = online_softmax(score, unit, most, total)
            if FORM == FORM_PLAIN:
                acc = dot(weight.to(q.dtype), latent, acc * fading[:, None])
            else:
                weight = (weight * scale).to(q.dtype)
                acc = dot(weight, latent, acc * fading[:, None])
                acc_odd = dot(weight, latent_odd, acc_odd * fading[:, None])
        if begin < end:
            m_own = m_row & (chunk_tiles(position, 0, TILE, SPLITS) == tiles)
            o_space = ((first_row + o_query).to(tl.int64) * HEADS + o_head) * SPLITS + i_split
            tl.store(p_most + o_space, most, mask=m_own)
            tl.store(p_total + o_space, total, mask=m_own)
            store_output(p_acc, o_space * RANK, m_own, acc, acc_odd, RANK, BLOCK_RANK, FORM)


ROWS, TILE = 16, 32


def choose_warps(gpu: Gpu, heads: int) -> tuple[int, int]:
    """Return warps and stages of a program.

    Estimated: a warp holds its rows' entire query as an operand of tensor cores, 128 registers at rank 512 and 16
    rows; 32 keys are 36 KB. There is one tile in flight, or two. With one, and a number of heads that is not a
    power of two, whose division takes registers, four warps spill with Triton 3.6; with others, eight spill with
    3.9.
    """
    if not gpu.small_shared:
        return 4, 5
    return (4 if gpu.amd_arch or triton.next_power_of_2(heads) == heads else 8), 3


def mla_unsupported(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> str | None:
    if reason := gpu_unsupported(q):
        return reason
    if batch.max_query_len > MAX_DECODE_TOKENS:
        return f"a sequence has more than {MAX_DECODE_TOKENS} new tokens"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"queries are in {q.dtype}"
    if cache.scale is not None and (config.kv_lora_rank % 2 or config.rope_dim % 2):
        return "an 8-bit cache is read in pairs, but the latent or its key has an odd number of dimensions"
    if config.kv_lora_rank * q.element_size() > MAX_HEAD_BYTES:
        return f"latents have more than {MAX_HEAD_BYTES} bytes"
    return None


@kernel("latent_attention", "triton-absorbed", mla_unsupported, first=True)
def latent_attention_absorbed(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    c = config
    nope, rotated = q.split((c.nope_dim, c.rope_dim), -1)
    absorbed_q = per_head_matmul(nope, k_b, out_first=False)  # [T, heads, rank]
    splits = choose_splits(q, triton.cdiv(c.heads, ROWS), TILE)
    mixed = q.new_empty(len(q), c.heads, c.kv_lora_rank)
    for turn in turns(batch, c.heads, splits, c.kv_lora_rank):
        space = SplitWorkspace.allocate(q, turn.tokens, c.heads, splits, c.kv_lora_rank)
        launch_turn(space, absorbed_q, rotated, cache, batch, c, turn)
        combine_splits(mixed, space, batch, turn, batch.max_query_len, 0, TILE)
    return per_head_matmul(mixed, v_b, out_first=True)


def launch_turn(
    space: SplitWorkspace,
    absorbed_q: Tensor,
    rotated: Tensor,
    cache: LatentCache,
    batch: Batch,
    c: LatentConfig,
    turn: Turn,
) -> None:
    """Write the chunks of some sequences to the workspace."""
    latents, form = cache_form(cache.latents)
    pair, splits = 1 if form == FORM_PLAIN.value else 2, space.total.shape[2]
    warps, stages = choose_warps(gpu_of(rotated.device), c.heads)
    launch_kernel(
        mla_kernel,
        (triton.cdiv(batch.max_query_len * c.heads, ROWS), splits, turn.sequences),
        warps=warps,
        stages=stages,
        device=rotated.device,
        p_q=absorbed_q,
        p_turned=rotated,
        p_rows=latents,
        p_scale=cache.scale,
        p_acc=space.acc,
        p_most=space.max_score,
        p_total=space.total,
        p_table=batch.block_table,
        p_start=batch.query_start,
        p_context=batch.context_len,
        p_row=workspace_rows(batch),
        first=turn.first,
        first_token=turn.first_token,
        q_token=absorbed_q.stride(0),
        q_head=absorbed_q.stride(1),
        turned_token=rotated.stride(0),
        turned_head=rotated.stride(1),
        table_row=batch.block_table.stride(0),
        unit=score_units(c.scale, None)[0],
        HEADS=c.heads,
        RANK=c.kv_lora_rank,
        ROPE=c.rope_dim,
        PAIR=pair,
        BLOCK_RANK=max(16, triton.next_power_of_2(c.kv_lora_rank // pair)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(c.rope_dim // pair)),
        ROWS=ROWS,
        TILE=TILE,
        SPLITS=splits,
        BLOCK=batch.block_size,
        FORM=form,
    )


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, heads, nope, value, form, queries in (
        ("DeepSeek V2 Lite", 16, 128, 128, torch.bfloat16, 1),
        ("DeepSeek V2 Lite, FP8 cache", 16, 128, 128, torch.float8_e4m3fn, 1),
        ("GLM 4.7 Flash, 4 tokens", 20, 192, 256, torch.bfloat16, 4),
        ("DeepSeek V3, INT8 cache", 128, 128, 128, torch.int8, 1),
    ):
        c = LatentConfig(heads, None, 512, nope, 64, value, RopeConfig(1e4, 64), 0.1, 1e-6)
        yield name, mla_example(c, form, queries)


def mla_example(c: LatentConfig, form: torch.dtype, queries: int) -> Callable[[], object]:
    def call() -> Tensor:
        sizes = (
            (queries, c.heads, c.nope_dim + c.rope_dim),
            (c.heads, c.nope_dim, c.kv_lora_rank),
            (c.heads, c.value_dim, c.kv_lora_rank),
        )
        q, k_b, v_b = (torch.empty(size, dtype=torch.bfloat16, device=META_DEVICE) for size in sizes)
        cache = LatentCache(EXAMPLE_CONTEXT // 16, 16, (c.kv_lora_rank, c.rope_dim), form, META_DEVICE)
        return latent_attention_absorbed(q, cache, meta_batch(1, queries), c, k_b, v_b)

    return call

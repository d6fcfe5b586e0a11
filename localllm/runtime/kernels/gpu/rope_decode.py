"""Rope, append and attention in one kernel, where each sequence has one new token.

It replaces the launch of rope_append.py before decode.py, and gives the same bits: a token's result must not
depend on whether other sequences of its step have more. A program rotates the queries of its rows. Of the
programs of a key head, the one whose chunk ends with the new token also computes its key and value, writes them to
the cache, and inserts them from registers into its last tile: no program reads the slot that this launch writes.
That tile is computed after the loop over the others, which is the one of decode.py.

Bytes: those of decode.py. A token's row of the product is read by each program, from L2 by all but the first.
"""

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportArgumentType=false

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import AttentionConfig, RopeConfig
from localllm.quant.vectors import INT4, KV_DTYPES, KVDtype
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.attention import append_and_attend
from localllm.runtime.kernels.elementwise import sigmoid
from localllm.runtime.kernels.gpu.decode import (
    attention_unsupported,
    choose_tile,
    prefetch_tile,
    score_arguments,
    tile_rows,
)
from localllm.runtime.kernels.gpu.launch import allow_next_kernel, gpu_of, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.paged import (
    EXAMPLE_CONTEXT,
    FORM_FP8,
    FORM_INT4,
    FORM_INT8,
    FORM_PLAIN,
    META_DEVICE,
    MIN_SCORE,
    attend_tile,
    cache_form,
    meta_batch,
    store_output,
    zero_accumulator,
)
from localllm.runtime.kernels.gpu.rope_append import (
    load_norm_weights,
    norm_and_rotate,
    quantize_to_int4,
    quantize_vectors,
    query_factor,
    rope_append_unsupported,
    rope_arguments,
    rotate_vectors,
    split_gates,
)
from localllm.runtime.kernels.gpu.rounding import round_to_dtype, sum_in_pairs
from localllm.runtime.kernels.gpu.splits import (
    SplitWorkspace,
    Turn,
    choose_splits,
    chunk_tiles,
    combine_splits,
    split_chunk,
    turns,
)
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import kernel
from localllm.runtime.kernels.rope_append import Angles
from localllm.runtime.kv_cache.tensors import KVCache

# With more sequences, a launch takes less than the rotations that all programs of a key head repeat (estimated).
MAX_SEQUENCES = 16
MAX_HEAD_BYTES = 512  # wider ones leave no registers for rotations
# With 8-bit caches Triton 3.6 would limit itself to 168 and spill; with 192, two programs fit as with all others.
MOST_REGISTERS = 192


@triton.jit
def as_stored(x, m, FORM: tl.constexpr, FORM_MOST: tl.constexpr, BLOCK_WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Return a vector x [1, dim] as `load_rows` reads it from the cache, its scale as the cache has it, and scale
    and offset as `load_scales` returns them. m: [1, dim], dimensions that exist
    """
    if FORM == FORM_PLAIN:
        none = tl.zeros([1], tl.float32)
        return round_to_dtype(x, TYPE), none, none, none
    elif FORM == FORM_INT4:
        pairs, scale, offset = quantize_to_int4(x, m, tl.bfloat16)
        low, high = scale.to(tl.int16, bitcast=True).to(tl.int32), offset.to(tl.int16, bitcast=True).to(tl.int32)
        return pairs, (low & 0xFFFF) | (high << 16), scale.to(tl.float32), offset.to(tl.float32)
    else:
        codes, scale = quantize_vectors(x, m, FORM_MOST, tl.bfloat16)
        even, odd = tl.split(tl.reshape(codes, [1, BLOCK_WIDTH, 2]))
        pairs = (even.to(tl.int16) & 0xFF) | (odd.to(tl.int16) << 8)
        return pairs, scale, scale.to(tl.float32), scale.to(tl.float32)


@triton.jit
def store_vector(p_rows, p_scale, vector, o_vector, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Write a vector, as `as_stored` returns it, to the cache."""
    o_column = tl.arange(0, vector[0].shape[1])[None, :]
    tl.store(p_rows + o_vector * WIDTH + o_column, vector[0], mask=o_column < WIDTH)
    if FORM != FORM_PLAIN:
        tl.store(p_scale + o_vector + tl.arange(0, 1), vector[1])


@triton.jit(do_not_specialize=["first", "table_row"])
def rope_decode_kernel(
    p_x,
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
    p_slot,
    p_cos,
    p_sin,
    p_q_weight,
    p_k_weight,
    first,
    table_row,
    stride,
    unit,
    bend,
    q_eps,
    k_eps,
    v_eps,
    beta,
    original,
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
    K_HEADS: tl.constexpr,  # key heads that the layer computes: all, or none if it reads another layer's
    Q_STEP: tl.constexpr,
    V_AT: tl.constexpr,
    Q_KIND: tl.constexpr,
    K_KIND: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROWS: tl.constexpr,
    FORM_MOST: tl.constexpr,
    VALUE_FORM_MOST: tl.constexpr,
    STAGES: tl.constexpr,
    STAGES_FACTOR: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `rope_append_kernel` and `decode_kernel`, and take their parameters. x: [sequences, stride]"""
    TYPE: tl.constexpr = p_x.dtype.element_ty
    DIMS: tl.constexpr = BLOCK_WIDTH if FORM == FORM_PLAIN else 2 * BLOCK_WIDTH
    row_tiles = tl.num_programs(0) // KV_HEADS
    i_head = tl.program_id(0) // row_tiles
    i_row = tl.program_id(0) % row_tiles * ROWS
    i_split = tl.program_id(1)
    i_sequence = first + tl.program_id(2)  # and token
    if PDL:
        prefetch_tile(
            p_k, p_v, p_table, p_start, p_context, i_sequence, i_head, i_row, i_split, table_row,
            KV_HEADS, GROUP, WIDTH, TILE, SPLITS, BLOCK, WINDOW,
        )  # fmt: skip
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    position = tl.load(p_context + i_sequence) - 1
    tiles = chunk_tiles(position, WINDOW, TILE, SPLITS)
    span = tiles * TILE
    chunk = split_chunk(i_split, position, span, WINDOW, SPLITS)
    begin = chunk * span
    end = tl.minimum(begin + span, position + 1)
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(position - WINDOW + 1, 0) // TILE * TILE)
    if begin >= end:  # also without a sequence, whose position is -1
        return
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < GROUP
    o_head = i_head * GROUP + o_row
    i = tl.arange(0, DIMS)[None, :]
    token = i_sequence.to(tl.int64)
    p_x += token * stride
    p_cos += token * HALF
    p_sin += token * HALF
    m = m_row[:, None] & (i < DIM)
    x_weight, y_weight = load_norm_weights(p_q_weight, o_head, i, m, DIM, Q_WEIGHTED, False, HALF, INTERLEAVED)
    x = norm_and_rotate(
        p_x + o_head[:, None] * Q_STEP, p_x, p_cos, p_sin, x_weight, y_weight, i, m, q_eps,
        Q_KIND, DIM, False, PART, HALF, INTERLEAVED,
    )  # fmt: skip
    if GROWS:
        x *= query_factor(position.to(tl.float32), beta, original, TYPE)
    if STAGES > 0:
        x = rotate_vectors(round_to_dtype(x, TYPE).to(tl.float32), STAGES, STAGES_FACTOR)
    q = round_to_dtype(x, TYPE)
    q_odd = q
    if FORM != FORM_PLAIN:
        q, q_odd = tl.split(tl.reshape(q, [ROWS, BLOCK_WIDTH, 2]))
    p_table += i_sequence * table_row
    positions = tl.zeros([ROWS], tl.int32) + position
    most = tl.full([ROWS], MIN_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, acc_odd = zero_accumulator(ROWS, BLOCK_WIDTH, FORM)
    last = position // TILE * TILE
    stop = end
    if K_HEADS > 0:
        stop = tl.minimum(end, last)
    for at in range(begin, stop, TILE):
        acc, acc_odd, most, total = attend_tile(
            at, q, q_odd, acc, acc_odd, most, total, positions, position, position, i_head,
            p_k, p_v, p_k_scale, p_v_scale, p_table, unit, bend,
            KV_HEADS, WIDTH, BLOCK_WIDTH, TILE, BLOCK, WINDOW, BENT, FORM, VALUE_FORM, True,
        )  # fmt: skip
    if K_HEADS > 0:  # noqa: SIM102 - decided when it is compiled
        if end > position:
            key_head = i_head + tl.zeros([1], tl.int32)
            m_dim = i < DIM
            p_key = p_x + K_HEADS * GROUP * Q_STEP
            key_weight, partner_weight = load_norm_weights(
                p_k_weight, key_head, i, m_dim, DIM, K_WEIGHTED, False, HALF, INTERLEAVED
            )
            k = norm_and_rotate(
                p_key + key_head[:, None] * DIM, p_key, p_cos, p_sin, key_weight, partner_weight, i, m_dim, k_eps,
                K_KIND, DIM, False, PART, HALF, INTERLEAVED,
            )  # fmt: skip
            if STAGES > 0:
                k = rotate_vectors(k, STAGES, STAGES_FACTOR)
            key = as_stored(k, m_dim, FORM, FORM_MOST, BLOCK_WIDTH, p_k.dtype.element_ty)
            v = tl.load(p_x + V_AT + key_head[:, None] * DIM + i, mask=m_dim, other=0.0).to(tl.float32)
            if VALUE_NORM:
                v *= tl.rsqrt(sum_in_pairs(v * v) / DIM + v_eps)
                v = round_to_dtype(v, TYPE).to(tl.float32)
            value = as_stored(v, m_dim, VALUE_FORM, VALUE_FORM_MOST, BLOCK_WIDTH, p_v.dtype.element_ty)
            acc, acc_odd, most, total = attend_tile(
                last, q, q_odd, acc, acc_odd, most, total, positions, position, position, i_head,
                p_k, p_v, p_k_scale, p_v_scale, p_table, unit, bend,
                KV_HEADS, WIDTH, BLOCK_WIDTH, TILE, BLOCK, WINDOW, BENT, FORM, VALUE_FORM, True, key, value,
            )  # fmt: skip
            slot = tl.load(p_slot + i_sequence)
            if (i_row == 0) & (slot >= 0):
                store_vector(p_k, p_k_scale, key, slot * KV_HEADS + i_head, WIDTH, FORM)
                store_vector(p_v, p_v_scale, value, slot * KV_HEADS + i_head, WIDTH, VALUE_FORM)
    o_space = tl.program_id(2).to(tl.int64) * (KV_HEADS * GROUP) + o_head
    o_space = o_space * SPLITS + chunk % SPLITS
    tl.store(p_most + o_space, most, mask=m_row)
    tl.store(p_total + o_space, total, mask=m_row)
    store_output(p_acc, o_space * DIM, m_row, acc, acc_odd, DIM, BLOCK_WIDTH, FORM)


def rope_decode_unsupported(
    qkv: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
    sinks: Tensor | None,
) -> str | None:
    if batch.max_query_len > 1:
        return "a sequence has more than one new token"
    if len(batch.context_len) > MAX_SEQUENCES:
        return f"there are more than {MAX_SEQUENCES} sequences"
    if config.qk_norm == "whole":
        return "heads are normalized together"
    if gpu_of(qkv.device).amd_arch.startswith("gfx1"):  # it spilled up to 187 of 256
        return "RDNA has too few registers"
    if triton.next_power_of_2(config.head_dim) * qkv.element_size() > MAX_HEAD_BYTES:
        return f"heads have more than {MAX_HEAD_BYTES} bytes"
    if reason := rope_append_unsupported(qkv, cache, batch, config, angles, q_norm, k_norm, eps):
        return reason
    return attention_unsupported(qkv, cache, batch, config, sinks)


@kernel("append_and_attend", "triton-rope-decode", rope_decode_unsupported, first=True)
def rope_decode(
    qkv: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
    sinks: Tensor | None,
) -> Tensor:
    c = config
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    out = qkv.new_empty(len(qkv), c.heads, c.head_dim)
    tile, _, _ = choose_tile(out, cache_form(cache.k)[1])
    splits = choose_splits(out, c.kv_heads, tile, c.window or 0)
    for turn in turns(batch, c.heads, splits, c.head_dim):
        space = SplitWorkspace.allocate(out, turn.tokens, c.heads, splits, c.head_dim)
        launch_turn(space, qkv, out, cache, batch, c, angles, q_norm, k_norm, eps, turn)
        combine_splits(out, space, batch, turn, 1, c.window or 0, tile, sinks)
    gates = split_gates(qkv, c)
    return out if gates is None else out * sigmoid(gates)


def launch_turn(
    space: SplitWorkspace,
    qkv: Tensor,
    out: Tensor,
    cache: KVCache,
    batch: Batch,
    c: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
    turn: Turn,
) -> None:
    """Write the chunks of some sequences to the workspace, and their keys and values to the cache."""
    group, rows = c.heads // c.kv_heads, tile_rows(c.heads // c.kv_heads)
    _, warps, stages = choose_tile(out, cache_form(cache.k)[1])
    eight_bits = all(cache_form(each)[1] in (FORM_INT8.value, FORM_FP8.value) for each in (cache.k, cache.v))
    launch_kernel(
        rope_decode_kernel,
        (c.kv_heads * triton.cdiv(group, rows), space.total.shape[2], turn.sequences),
        warps=warps,
        stages=stages,
        device=qkv.device,
        contract=False,
        most_registers=MOST_REGISTERS if eight_bits else None,
        p_x=qkv,
        p_slot=batch.slot_mapping,
        first=turn.first,
        **score_arguments(space, out, cache, batch, c),
        **rope_arguments(qkv, cache, c, angles, q_norm, k_norm, eps),
    )


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    rope = RopeConfig(500000.0, 128)
    llama = AttentionConfig(32, 8, 128, rope, 0.1)
    qwen = replace(llama, qk_norm="per_head")
    gpt_oss = AttentionConfig(64, 8, 64, replace(rope, dim=64), 0.1, window=128, sinks=True)
    gemma2 = AttentionConfig(16, 8, 256, replace(rope, dim=256), 0.1, window=4096, softcap=50.0)
    for name, c, form in (
        ("Llama 3 8B", llama, torch.bfloat16),
        ("Llama 3 8B, INT8 cache", llama, torch.int8),
        ("Llama 3 8B, K8V4 cache", llama, KV_DTYPES["k8v4"]),
        ("Llama 3 8B, INT4 cache", llama, INT4),
        ("Qwen3 8B", qwen, torch.bfloat16),
        ("Qwen3 8B, FP8 cache", qwen, torch.float8_e4m3fn),
        ("Qwen3 8B, INT4 cache", qwen, INT4),
        ("gpt-oss 20B", gpt_oss, torch.bfloat16),
        ("Gemma 2 9B", gemma2, torch.bfloat16),
    ):
        yield name, example(c, form)


def example(c: AttentionConfig, form: KVDtype) -> Callable[[], object]:
    """Return a call in bfloat16 for one sequence."""

    def call() -> Tensor:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=META_DEVICE)

        cache = KVCache(EXAMPLE_CONTEXT // 16, 16, c.kv_heads, c.head_dim, form, META_DEVICE)
        norm = Norm(empty(c.head_dim, dtype=torch.float32), 1e-6) if c.qk_norm else None
        half = c.rope.dim // 2 if c.rope else 0
        angles = empty(1, 1, half, dtype=torch.float32), empty(1, 1, half, dtype=torch.float32)
        qkv, sinks = empty(1, (c.heads + 2 * c.kv_heads) * c.head_dim), empty(c.heads) if c.sinks else None
        return append_and_attend(qkv, cache, meta_batch(1, 1), c, angles, norm, norm, 1e-6, sinks)

    return call

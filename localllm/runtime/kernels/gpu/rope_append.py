"""Everything between the product of q, k and v and attention in one kernel.

These are norms of heads, rotary positions, scaling of queries, rotation for 4 bits, and appending keys and
values to the cache, quantized if the cache is. Each vector of a head is read, changed and written once. Values are
rounded where torch rounds them, so that a cache has the same bits whichever path wrote it, unless a fused
multiply-add or another order of a norm's sum changes a rounding. A program processes HEADS heads of one token, of
q, of k or of v.

Bytes: a token's row of the product once, q once, keys and values once. A norm across all heads reads the row of q
or k once more per program, from a cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import AttentionConfig, QueryScaling, RopeConfig
from localllm.quant.vectors import DTYPE_MAX, INT4, INT4_MIN, INT4_STEPS, SCALE_DTYPE, KVDtype
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.launch import allow_next_kernel, gpu_unsupported, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.norms import FLOAT_DTYPES
from localllm.runtime.kernels.gpu.rounding import round_to_dtype, sum_in_pairs
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import kernel
from localllm.runtime.kernels.rope_append import Angles
from localllm.runtime.kv_cache.tensors import KVCache, as_bits

BLOCK_HEADS = 4  # per program; a constant, so that sums keep their order
MAX_HEAD_DIM = 1024  # a head
BLOCK_COLUMNS = 1024  # elements at a time of a norm across all heads
MIN_SCALE: tl.constexpr = tl.constexpr(torch.finfo(SCALE_DTYPE).tiny)
# Adding and subtracting it rounds a small float32 half to even.
ROUND_MAGIC: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
INT4_MOST: tl.constexpr = tl.constexpr(DTYPE_MAX[INT4])
INT4_LEAST: tl.constexpr = tl.constexpr(float(INT4_MIN))
INT4_RANGE: tl.constexpr = tl.constexpr(float(INT4_STEPS))


@triton.jit
def encode_e4m3(x):
    """Return float32 values from -448 to 448 or NaN as bits of e4m3, rounded half to even.

    Not every architecture has the type.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (tl.abs(x) * 512.0 + ROUND_MAGIC) - ROUND_MAGIC
    code = tl.where(size < 0x3C800000, subnormal.to(tl.int32), normal)  # 2^-6
    return tl.where(size > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def quantize_vectors(x, m, FORM_MOST: tl.constexpr, SCALE_TYPE: tl.constexpr):
    """Quantize x [heads, dim] float32 to 8 bits, with bfloat16 scales [heads], as in quant/vectors.py."""
    x = tl.where(m, x, 0.0)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.div_rn(largest, FORM_MOST + tl.zeros_like(largest)), MIN_SCALE)
    scale += tl.sum(x * 0.0, 1)  # makes it NaN if a value is NaN or infinite
    scale = round_to_dtype(scale, SCALE_TYPE)
    x = tl.div_rn(x, (tl.zeros_like(x) + scale.to(tl.float32)[:, None]))
    if FORM_MOST == 127.0:
        x = (x + ROUND_MAGIC) - ROUND_MAGIC
    x = tl.where(x > FORM_MOST, FORM_MOST, tl.where(x < -FORM_MOST, -FORM_MOST, x))
    return x.to(tl.int8) if FORM_MOST == 127.0 else encode_e4m3(x), scale


@triton.jit
def quantize_to_int4(x, m, SCALE_TYPE: tl.constexpr):
    """Quantize x [heads, dim] float32 to pairs of 4 bits [heads, dim / 2], as in quant/vectors.py.

    m: [1, dim], dimensions that exist. Returns the pairs, and bfloat16 scales and offsets [heads].
    """
    low = tl.min(tl.where(m, x, float("inf")), 1)
    high = tl.max(tl.where(m, x, float("-inf")), 1)
    steps = INT4_RANGE + tl.zeros_like(low)
    scale = tl.maximum(tl.div_rn(high, steps) - tl.div_rn(low, steps), MIN_SCALE)
    scale += tl.sum(tl.where(m, x * 0.0, 0.0), 1)  # makes it NaN if a value is NaN or infinite
    scale = round_to_dtype(scale, SCALE_TYPE)
    offset = round_to_dtype(low - INT4_LEAST * scale.to(tl.float32), SCALE_TYPE)
    x = tl.div_rn(x - offset.to(tl.float32)[:, None], tl.zeros_like(x) + scale.to(tl.float32)[:, None])
    x = (x + ROUND_MAGIC) - ROUND_MAGIC
    x = tl.where(x > INT4_MOST, INT4_MOST, tl.where(x < INT4_LEAST, INT4_LEAST, x))
    even, odd = tl.split(tl.reshape(x.to(tl.int8), [x.shape[0], x.shape[1] // 2, 2]))
    return (even & 15) | (odd << 4), scale, offset


@triton.jit
def rotate_vectors(x, STAGES: tl.constexpr, FACTOR: tl.constexpr):
    """Multiply each 2**STAGES adjacent elements of x [heads, dim] by a Hadamard matrix, as in quant/vectors.py."""
    HEADS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    for i_stage in tl.static_range(STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        pairs = tl.permute(tl.reshape(x, [HEADS, BLOCK >> (i_stage + 1), 2, 1 << i_stage]), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        pairs = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), [HEADS, BLOCK])
    return x * FACTOR


@triton.jit
def store_to_cache(
    p_rows, p_scale, x, slot, head, i, m, HEADS_KEPT: tl.constexpr, DIM: tl.constexpr, FORM_MOST: tl.constexpr
):
    """Write heads of a token to its cache slot, unless the slot is negative."""
    if slot >= 0:
        row = slot * HEADS_KEPT + head
        if FORM_MOST == INT4_MOST:
            pairs, scale, offset = quantize_to_int4(x, i < DIM, p_scale.dtype.element_ty)
            pair = tl.arange(0, x.shape[1] // 2)[None, :]
            m_pair = (head[:, None] < HEADS_KEPT) & (pair < DIM // 2)
            tl.store(p_rows + row[:, None] * (DIM // 2) + pair, pairs, mask=m_pair)
            tl.store(p_scale + 2 * row, scale, mask=head < HEADS_KEPT)
            tl.store(p_scale + 2 * row + 1, offset, mask=head < HEADS_KEPT)
        elif FORM_MOST > 0:
            bits, scale = quantize_vectors(x, m, FORM_MOST, p_scale.dtype.element_ty)
            tl.store(p_rows + row[:, None] * DIM + i, bits, mask=m)
            tl.store(p_scale + row, scale, mask=head < HEADS_KEPT)
        else:
            tl.store(p_rows + row[:, None] * DIM + i, round_to_dtype(x, p_rows.dtype.element_ty), mask=m)


@triton.jit
def norm_moments(
    x, m, p_row, KIND: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, PART: tl.constexpr, eps
):
    """Return the mean that a norm subtracts and the factor that it multiplies by, [heads, 1]."""
    if KIND == "none":
        return 0.0, 1.0
    elif WHOLE:
        tl.static_assert(KIND == "rms")
        squares = tl.zeros([PART], tl.float32)
        for begin in range(0, SIZE, PART):
            i = begin + tl.arange(0, PART)
            part = tl.load(p_row + i, mask=i < SIZE, other=0.0).to(tl.float32)
            squares += part * part
        mean = tl.zeros([1, 1], tl.float32)
        return mean, mean + tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    else:
        mean = tl.zeros([1, 1], tl.float32)
        if KIND == "layer":
            mean = sum_in_pairs(x) / SIZE
            x = tl.where(m, x - mean, 0.0)
        return mean, tl.rsqrt(sum_in_pairs(x * x) / SIZE + eps)


@triton.jit
def rotation_partner(i, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the index of the element that each element is rotated with."""
    return (i ^ 1) if INTERLEAVED else tl.where(i < HALF, i + HALF, i - HALF)


@triton.jit
def load_norm_weights(
    p_weight,
    head,
    i,
    m,
    DIM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WHOLE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return the norm's weights of the elements and of their rotation partners; otherwise ones."""
    if WEIGHTED:
        p_weight += head[:, None] * DIM if WHOLE else tl.zeros_like(head)[:, None]
        partner = rotation_partner(i, HALF, INTERLEAVED)
        turning = m & (i < 2 * HALF)
        return tl.load(p_weight + i, mask=m, other=0.0), tl.load(p_weight + partner, mask=turning, other=0.0)
    else:
        return 1.0, 1.0


@triton.jit
def norm_and_rotate(
    p,
    p_row,
    p_cos,
    p_sin,
    x_weight,
    y_weight,
    i,
    m,
    eps,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    PART: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return heads of q or k at p [heads, 1], normalized and rotated: [heads, dim] float32, rounded to their
    dtype.
    """
    TYPE: tl.constexpr = p_row.dtype.element_ty
    x = tl.load(p + i, mask=m, other=0.0).to(tl.float32)
    y, cos, sin, turning = x, 1.0, 0.0, m
    if HALF > 0:  # all loads come before the first sum
        turning = m & (i < 2 * HALF)
        y = tl.load(p + rotation_partner(i, HALF, INTERLEAVED), mask=turning, other=0.0).to(tl.float32)
        pair = i // 2 if INTERLEAVED else i % HALF
        cos = tl.load(p_cos + pair, mask=i < 2 * HALF, other=1.0)
        sin = tl.load(p_sin + pair, mask=i < 2 * HALF, other=0.0)
    mean, factor = norm_moments(x, m, p_row, KIND, SIZE, WHOLE, PART, eps)
    if KIND != "none":
        x = round_to_dtype((x - mean) * factor * x_weight, TYPE).to(tl.float32)
    if HALF > 0:
        if KIND != "none":
            y = round_to_dtype((y - mean) * factor * y_weight, TYPE).to(tl.float32)
        first = (i % 2 == 0) if INTERLEAVED else (i < HALF)
        x = tl.where(turning, x * cos + tl.where(first, -y, y) * sin, x)
        x = round_to_dtype(x, TYPE).to(tl.float32)
    return x


@triton.jit
def query_factor(position, beta, original, TYPE: tl.constexpr):
    """Return the factor of queries at a position, rounded to TYPE."""
    growth = 1.0 + beta * tl.log(1.0 + tl.floor(tl.div_rn(position, original)))
    return round_to_dtype(growth, TYPE).to(tl.float32)


@triton.jit
def rope_append_kernel(
    p_x,
    p_q,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_slot,
    p_positions,
    p_cos,
    p_sin,
    p_q_weight,
    p_k_weight,
    stride,
    q_eps,
    k_eps,
    v_eps,
    beta,
    original,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,  # heads whose keys and values this layer computes
    DIM: tl.constexpr,
    Q_STEP: tl.constexpr,  # stride of a head of q: twice as large if its gate follows it
    V_AT: tl.constexpr,  # index of the first value in a row
    Q_KIND: tl.constexpr,  # "rms", "layer" or no norm
    K_KIND: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    WHOLE: tl.constexpr,  # q and k are normalized across heads
    VALUE_NORM: tl.constexpr,
    HALF: tl.constexpr,  # rotated pairs per head
    INTERLEAVED: tl.constexpr,
    GROWS: tl.constexpr,
    FORM_MOST: tl.constexpr,  # largest value of the keys' 8-bit or 4-bit type; 0: they have more bits
    VALUE_FORM_MOST: tl.constexpr,
    STAGES: tl.constexpr,  # 2**STAGES adjacent dimensions of q and k are rotated together before they are stored
    STAGES_FACTOR: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    Q_PROGRAMS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    K_PROGRAMS: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    i = tl.arange(0, BLOCK)[None, :]
    p_x += token * stride
    p_cos += token * HALF
    p_sin += token * HALF
    if program < Q_PROGRAMS:
        head = program * HEADS + tl.arange(0, HEADS)
        m = (head[:, None] < Q_HEADS) & (i < DIM)
        p = p_x + head[:, None] * Q_STEP
        x_weight, y_weight = load_norm_weights(p_q_weight, head, i, m, DIM, Q_WEIGHTED, WHOLE, HALF, INTERLEAVED)
        wait_for_inputs(PDL)
        allow_next_kernel(PDL)
        position = 0.0
        if GROWS:
            position = tl.load(p_positions + token).to(tl.float32)
        x = norm_and_rotate(
            p, p_x, p_cos, p_sin, x_weight, y_weight, i, m, q_eps,
            Q_KIND, Q_HEADS * DIM if WHOLE else DIM, WHOLE, PART, HALF, INTERLEAVED,
        )  # fmt: skip
        if GROWS:
            x *= query_factor(position, beta, original, p_q.dtype.element_ty)
        if STAGES > 0:
            x = rotate_vectors(round_to_dtype(x, p_q.dtype.element_ty).to(tl.float32), STAGES, STAGES_FACTOR)
        tl.store(
            p_q + (token * Q_HEADS + head[:, None]) * DIM + i, round_to_dtype(x, p_q.dtype.element_ty), mask=m
        )
    elif program < Q_PROGRAMS + K_PROGRAMS:
        head = (program - Q_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        m = (head[:, None] < K_HEADS) & (i < DIM)
        p_row = p_x + Q_HEADS * Q_STEP
        p = p_row + head[:, None] * DIM
        x_weight, y_weight = load_norm_weights(p_k_weight, head, i, m, DIM, K_WEIGHTED, WHOLE, HALF, INTERLEAVED)
        wait_for_inputs(PDL)
        allow_next_kernel(PDL)
        slot = tl.load(p_slot + token)
        x = norm_and_rotate(
            p, p_row, p_cos, p_sin, x_weight, y_weight, i, m, k_eps,
            K_KIND, K_HEADS * DIM if WHOLE else DIM, WHOLE, PART, HALF, INTERLEAVED,
        )  # fmt: skip
        if STAGES > 0:
            x = rotate_vectors(x, STAGES, STAGES_FACTOR)
        store_to_cache(p_k, p_k_scale, x, slot, head, i, m, K_HEADS, DIM, FORM_MOST)
    else:
        head = (program - Q_PROGRAMS - K_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        m = (head[:, None] < K_HEADS) & (i < DIM)
        wait_for_inputs(PDL)
        allow_next_kernel(PDL)
        slot = tl.load(p_slot + token)
        x = tl.load(p_x + V_AT + head[:, None] * DIM + i, mask=m, other=0.0).to(tl.float32)
        if VALUE_NORM:
            x *= tl.rsqrt(sum_in_pairs(x * x) / DIM + v_eps)
            x = round_to_dtype(x, p_x.dtype.element_ty).to(tl.float32)
        store_to_cache(p_v, p_v_scale, x, slot, head, i, m, K_HEADS, DIM, VALUE_FORM_MOST)


def rope_append_unsupported(
    qkv: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
) -> str | None:
    if reason := gpu_unsupported(qkv):
        return reason
    if qkv.dtype not in FLOAT_DTYPES:
        return f"the product is in {qkv.dtype}"
    if cache.k.dtype not in DTYPE_MAX and cache.k.dtype != qkv.dtype:
        return f"the product is in {qkv.dtype}, the cache in {cache.k.dtype}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"a head is wider than {MAX_HEAD_DIM}"
    norms_all_heads = config.qk_norm == "whole"
    if norms_all_heads and config.output_gate:
        return "gates are between the heads that are normalized together"
    if norms_all_heads and any(norm and norm.norm_type == "layer" for norm in (q_norm, k_norm)):
        return "layer normalization across heads"
    return None


@kernel("rope_append", "triton-heads", rope_append_unsupported, first=True)
def rope_append(
    qkv: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Use one warp per program: four heads of 128 are two 128-bit loads of bfloat16 per thread (estimated)."""
    c = config
    own_kv_heads = c.kv_heads if c.kv_source is None else 0
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    q = qkv.new_empty(len(qkv), c.heads, c.head_dim)
    gates = split_gates(qkv, c)
    if not len(qkv):
        return q, gates
    block = triton.next_power_of_2(c.head_dim)
    launch_kernel(
        rope_append_kernel,
        (len(qkv), triton.cdiv(c.heads, BLOCK_HEADS) + 2 * triton.cdiv(own_kv_heads, BLOCK_HEADS)),
        max(1, BLOCK_HEADS * block // 512),
        device=qkv.device,
        contract=False,
        p_x=qkv,
        p_q=q,
        p_k=as_bits(cache.k),
        p_v=as_bits(cache.v),
        p_k_scale=cache.k_scale,
        p_v_scale=cache.v_scale,
        p_slot=batch.slot_mapping,
        p_positions=batch.positions,
        Q_HEADS=c.heads,
        DIM=c.head_dim,
        WHOLE=c.qk_norm == "whole",
        HEADS=BLOCK_HEADS,
        BLOCK=block,
        **rope_arguments(qkv, cache, c, angles, q_norm, k_norm, eps),
    )
    return q, gates


def split_gates(qkv: Tensor, c: AttentionConfig) -> Tensor | None:
    """Return the gates in rows of the product, [T, heads, head_dim], or None if there are none."""
    if not c.output_gate:
        return None
    return qkv[:, : 2 * c.heads * c.head_dim].unflatten(1, (c.heads, -1))[..., c.head_dim :]


def rope_arguments(
    qkv: Tensor,
    cache: KVCache,
    c: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
) -> dict[str, Any]:
    """Return the arguments of a kernel that normalizes, rotates and quantizes heads."""
    own_kv_heads = c.kv_heads if c.kv_source is None else 0
    step = (2 if c.output_gate else 1) * c.head_dim
    cos, sin = angles if c.rope and angles else (None, None)
    q_norm, k_norm = (norm if c.qk_norm else None for norm in (q_norm, k_norm))
    growth = c.query_growth or QueryScaling(0.0, 1)
    return {
        "p_cos": qkv if cos is None else cos,
        "p_sin": qkv if sin is None else sin,
        "p_q_weight": q_norm.weight if q_norm else None,
        "p_k_weight": k_norm.weight if k_norm else None,
        "stride": qkv.stride(0),
        "q_eps": q_norm.eps if q_norm else 0.0,
        "k_eps": k_norm.eps if k_norm else 0.0,
        "v_eps": eps,
        "beta": growth.beta,
        "original": float(growth.original_context),
        "K_HEADS": own_kv_heads,
        "Q_STEP": step,
        "V_AT": c.heads * step + (0 if c.keys_as_values else own_kv_heads * c.head_dim),
        "Q_KIND": q_norm.norm_type if q_norm else "none",
        "K_KIND": k_norm.norm_type if k_norm else "none",
        "Q_WEIGHTED": q_norm is not None and q_norm.weight is not None,
        "K_WEIGHTED": k_norm is not None and k_norm.weight is not None,
        "VALUE_NORM": c.value_norm,
        "HALF": 0 if cos is None else cos.shape[-1],
        "INTERLEAVED": bool(c.rope and c.rope.interleaved),
        "GROWS": c.query_growth is not None,
        "FORM_MOST": DTYPE_MAX.get(cache.k.dtype, 0.0),
        "VALUE_FORM_MOST": DTYPE_MAX.get(cache.v.dtype, 0.0),
        "STAGES": cache.rotation.bit_length() - 1,
        "STAGES_FACTOR": cache.rotation**-0.5,
        "PART": BLOCK_COLUMNS,
    }


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    def call(c: AttentionConfig, form: KVDtype) -> object:
        meta, tokens = torch.device("meta"), 4
        own = c.kv_heads if c.kv_source is None else 0
        rows = (c.heads * (2 if c.output_gate else 1) + (1 if c.keys_as_values else 2) * own) * c.head_dim
        half = (tokens, 1, c.rope.dim // 2) if c.rope else (0,)
        angles = (torch.empty(half, device=meta), torch.empty(half, device=meta)) if c.rope else None
        norm = Norm(torch.empty(c.head_dim, device=meta), 1e-6) if c.qk_norm else None
        places = torch.empty(tokens, dtype=torch.int64, device=meta)
        table = torch.empty(tokens, 1, dtype=torch.int32, device=meta)
        batch = Batch(places, places, table, table, table, places, places, 16, 1, 1)
        cache = KVCache(64, 16, c.kv_heads, c.head_dim, form, meta)
        x = torch.empty(tokens, rows, dtype=torch.bfloat16, device=meta)
        return rope_append(x, cache, batch, c, angles, norm, norm, 1e-6)

    llama = AttentionConfig(32, 8, 128, RopeConfig(500000.0, 128), 128**-0.5)
    qwen = replace(llama, qk_norm="per_head")
    gemma = AttentionConfig(8, 4, 256, RopeConfig(10000.0, 256), 0.0625, qk_norm="per_head")
    yield "32 + 8 heads of 128", lambda: call(llama, torch.bfloat16)
    yield "32 + 8 heads of 128, normed, INT8", lambda: call(qwen, torch.int8)
    yield "32 + 8 heads of 128, normed, FP8", lambda: call(qwen, torch.float8_e4m3fn)
    yield "32 + 8 heads of 128, normed, INT4", lambda: call(qwen, INT4)
    yield "8 + 4 heads of 256, normed", lambda: call(gemma, torch.bfloat16)

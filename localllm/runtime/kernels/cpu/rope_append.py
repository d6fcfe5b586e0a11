"""Rotary positions of q and k, and appending k and v to the KV cache, in one call, quantized if the cache is.

In torch it is twelve small operations, 76 us per layer of a decode step where weights have evicted their code from
the caches. Quantizing to INT8 took 45 us more there, and to INT4 with its rotation 220; here it takes 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.quant.vectors import DTYPE_MAX, INT4, INT4_MIN, INT4_STEPS, SCALE_DTYPE
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource, cpu_supported
from localllm.runtime.kernels.cpu.ir import BFLOAT, FLOAT, INT, LANES, SHORT, Program, Value, vector_type
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES
from localllm.runtime.kv_cache.tensors import KVCache

SINGLE_THREAD_TOKENS = 4
MAX_TOKENS = 64  # above, torch's operations take 1% of a step, and plans count their memory
ADDRESS_COUNT, INTEGER_COUNT = 9, 3
SMALLEST_SCALE = torch.finfo(SCALE_DTYPE).tiny


@dataclass(frozen=True)
class AppendSpec:
    """Properties of a call that a kernel is compiled for."""

    dtype: torch.dtype  # of the product
    key_dtype: torch.dtype  # in the cache
    value_dtype: torch.dtype
    head_dim: int
    half: int  # pairs (i, i + half) of a head are rotated by positions, the elements behind them are not
    rotation: int  # adjacent elements of q and k that a Hadamard matrix rotates afterwards, or 1


def emit_rope_append(p: Program, spec: AppendSpec) -> None:
    """qkv [T, heads + 2 kv_heads, head_dim] -> q [T, heads, head_dim], and slots of the cache."""
    qkv, cos, sin, q, k_cache, v_cache, k_scale, v_scale, slots = p.load_addresses(ADDRESS_COUNT)
    tokens, heads, kv_heads = p.load_counts(INTEGER_COUNT, begin=ADDRESS_COUNT)
    dtype, head_dim, half = spec.dtype, spec.head_dim, spec.half
    element, head_bytes, zero = ELEMENT_TYPES[dtype], head_dim * dtype.itemsize, p.index_constant(0)
    rotated = p.stack_buffer(head_bytes)  # a head before it is quantized

    def copy(source: Value, target: Value, begin: int) -> None:
        vector = vector_type(INT if dtype.itemsize == 4 else SHORT)
        for offset in range(begin * dtype.itemsize, head_bytes, LANES * dtype.itemsize):
            p.store(p.load(vector, source, offset), target, offset)

    def rotate(source: Value, target: Value, cosines: Value, sines: Value) -> None:
        for i in range(0, half, LANES):
            first, second = i * dtype.itemsize, (i + half) * dtype.itemsize
            a, b = (p.load_floats(element, source, offset) for offset in (first, second))
            c, s = (p.load_floats(FLOAT, angles, 4 * i) for angles in (cosines, sines))
            p.store_floats(a * c - b * s, element, target, first)
            p.store_floats(b * c + a * s, element, target, second)
        copy(source, target, 2 * half)

    def load_head(source: Value) -> list[Value]:
        return [p.load_floats(element, source, i * dtype.itemsize) for i in range(0, head_dim, LANES)]

    with p.loop(*p.part_range(tokens)) as token:
        slot = p.load(p.long, slots, token * 8)
        row = p.address(qkv, token * (heads + kv_heads * 2) * head_bytes)
        angles = [p.address(each, token * (4 * half)) for each in (cos, sin)]
        with p.loop(zero, heads) as head:
            target = p.address(q, (token * heads + head) * head_bytes)
            rotate(p.address(row, head * head_bytes), target, *angles)
            if spec.rotation > 1:
                for i, numbers in enumerate(rotate_head(p, load_head(target), spec.rotation)):
                    p.store_floats(numbers, element, target, i * LANES * dtype.itemsize)
        with p.loop(zero, kv_heads) as head:
            key, value = (p.address(row, (heads + head + offset) * head_bytes) for offset in (zero, kv_heads))
            vector = slot * kv_heads + head
            if spec.key_dtype == dtype:
                rotate(key, p.address(k_cache, vector * head_bytes), *angles)
            else:
                rotate(key, rotated, *angles)
                numbers = rotate_head(p, load_head(rotated), spec.rotation)
                store_quantized(p, numbers, spec.key_dtype, k_cache, k_scale, vector)
            if spec.value_dtype == dtype:
                copy(value, p.address(v_cache, vector * head_bytes), 0)
            else:
                store_quantized(p, load_head(value), spec.value_dtype, v_cache, v_scale, vector)


def rotate_head(p: Program, vectors: list[Value], size: int) -> list[Value]:
    """Multiply each `size` adjacent elements by a Hadamard matrix, as `rotate_vectors` in quant/vectors.py."""
    if size == 1:
        return vectors
    half = 1
    while half < min(size, LANES):
        partners = [lane ^ half for lane in range(LANES)]
        signs = p.lanes([-1.0 if lane & half else 1.0 for lane in range(LANES)])
        vectors = [p.shuffle(x, x, partners) + x * signs for x in vectors]
        half *= 2
    while half < size:
        step, sums = half // LANES, list(vectors)
        for i in (i for i in range(len(vectors)) if not i // step % 2):
            sums[i], sums[i + step] = vectors[i] + vectors[i + step], vectors[i] - vectors[i + step]
        vectors, half = sums, 2 * half
    return [x * size**-0.5 for x in vectors]


def store_quantized(
    p: Program, vectors: list[Value], dtype: torch.dtype, cache: Value, scales: Value, index: Value
) -> None:
    """Write a head to the cache as INT8 or INT4, with its scale, as `quantize_vectors` in quant/vectors.py."""
    low = high = vectors[0]
    wrong = vectors[0] * 0.0  # NaN where a number is NaN or infinite
    for x in vectors[1:]:
        low, high, wrong = p.minnum(low, x), p.maxnum(high, x), wrong + x * 0.0
    least, most = p.reduce_max(low * -1.0).broadcast() * -1.0, p.reduce_max(high).broadcast()
    steps = (
        (most / INT4_STEPS - least / INT4_STEPS)
        if dtype == INT4
        else p.maxnum(most, least * -1.0) / DTYPE_MAX[dtype]
    )
    scale = p.round_to(p.maxnum(steps, p.vector(SMALLEST_SCALE)) + p.reduce_nan(wrong).broadcast(), BFLOAT)
    if dtype != INT4:
        p.store_float(p.first_lane(scale), BFLOAT, scales, index * 2)
        target = p.address(cache, index * (len(vectors) * LANES))
        for i, x in enumerate(vectors):
            p.store_bytes(round_within(p, x / scale, -DTYPE_MAX[dtype], DTYPE_MAX[dtype]), target, i * LANES)
        return
    offset = p.round_to(least - scale * float(INT4_MIN), BFLOAT)
    p.store_float(p.first_lane(scale), BFLOAT, scales, index * 4)
    p.store_float(p.first_lane(offset), BFLOAT, scales, index * 4 + 2)
    codes = [round_within(p, (x - offset) / scale, INT4_MIN, DTYPE_MAX[INT4]) for x in vectors]
    target = p.address(cache, index * (len(vectors) * LANES // 2))
    for i in range(0, len(codes), 2):
        p.store_nibbles(codes[i : i + 2], p.address(target, i * LANES // 2))


def round_within(p: Program, x: Value, least: float, most: float) -> Value:
    return p.minnum(p.maxnum(x, p.vector(least)), p.vector(most)).round_to_int()


@CompileOnce
def compile_rope_append(spec: AppendSpec) -> KernelSource:
    return KernelSource(lambda p: emit_rope_append(p, spec), "rope_append", ADDRESS_COUNT + INTEGER_COUNT)


def unsupported(
    qkv: Tensor, cache: KVCache, config: AttentionConfig, angles: tuple[Tensor, Tensor] | None
) -> str | None:
    """Return why the kernel does not support the call, or None if it does."""
    c = config
    if not (qkv.is_cpu and cache.k.is_cpu and cpu_supported()):
        return "no kernel is compiled for it"
    if c.output_gate or c.qk_norm or c.value_norm or c.query_growth or c.keys_as_values or c.kv_source is not None:
        return "the layer has more than rotary positions"
    if c.rope is None or angles is None or c.rope.interleaved or angles[0].shape[-1] % LANES or c.head_dim % LANES:
        return "rotated halves of heads are no whole vectors"
    stored = {cache.k.dtype, cache.v.dtype}
    if qkv.dtype not in ELEMENT_TYPES or not stored <= {qkv.dtype, torch.int8, INT4}:
        return f"qkv is {qkv.dtype} and the cache {cache.k.dtype}"
    if 1 < cache.rotation < LANES:
        return "parts of heads that are rotated for 4 bits are no whole vectors"
    if qkv.shape[0] > MAX_TOKENS:
        return f"{qkv.shape[0]} tokens"
    contiguous = qkv.is_contiguous() and cache.k.is_contiguous() and cache.v.is_contiguous()
    return None if contiguous else "qkv or the cache is not contiguous"


def rope_append(
    qkv: Tensor, cache: KVCache, slot: Tensor, config: AttentionConfig, angles: tuple[Tensor, Tensor]
) -> Tensor:
    """Append keys and values to slots [T] int64 of the cache, and return q, [T, heads, head_dim]."""
    tokens, (cos, sin) = qkv.shape[0], (each.contiguous() for each in angles)
    assert qkv.shape[1] == (config.heads + 2 * config.kv_heads) * config.head_dim and slot.shape[0] == tokens
    assert cos.dtype == sin.dtype == torch.float32 and slot.dtype == torch.int64 and slot.is_contiguous()
    q = torch.empty(tokens, config.heads, config.head_dim, dtype=qkv.dtype)
    tensors = (qkv, cos, sin, q, cache.k, cache.v, cache.k_scale, cache.v_scale, slot)
    spec = AppendSpec(qkv.dtype, cache.k.dtype, cache.v.dtype, config.head_dim, cos.shape[-1], cache.rotation)
    kernel = compile_rope_append(spec)
    run = kernel.run_single if tokens <= SINGLE_THREAD_TOKENS else kernel
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    run(*addresses, tokens, config.heads, config.kv_heads)
    return q

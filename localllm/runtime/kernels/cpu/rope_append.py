"""Rotary positions of q and k, and appending k and v to the KV cache, in one call.

In torch it is twelve small operations, 76 us per layer of a decode step where weights have evicted their code from
the caches.
"""

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource, cpu_supported
from localllm.runtime.kernels.cpu.ir import FLOAT, INT, LANES, SHORT, Program, Value, vector_type
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES
from localllm.runtime.kv_cache.tensors import KVCache

SINGLE_THREAD_TOKENS = 4
MAX_TOKENS = 64  # above, torch's operations take 1% of a step, and plans count their memory
ADDRESS_COUNT, INTEGER_COUNT = 7, 3


def emit_rope_append(p: Program, dtype: torch.dtype, head_dim: int, half: int) -> None:
    """qkv [T, heads + 2 kv_heads, head_dim] -> q [T, heads, head_dim], and slots of the cache.

    half: pairs (i, i + half) of a head are rotated, the elements behind them are not.
    """
    qkv, cos, sin, q, k_cache, v_cache, slots = p.load_addresses(ADDRESS_COUNT)
    tokens, heads, kv_heads = p.load_counts(INTEGER_COUNT, begin=ADDRESS_COUNT)
    element, head_bytes, zero = ELEMENT_TYPES[dtype], head_dim * dtype.itemsize, p.index_constant(0)

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

    with p.loop(*p.part_range(tokens)) as token:
        slot = p.load(p.long, slots, token * 8)
        row = p.address(qkv, token * (heads + kv_heads * 2) * head_bytes)
        angles = [p.address(each, token * (4 * half)) for each in (cos, sin)]
        with p.loop(zero, heads) as head:
            rotate(p.address(row, head * head_bytes), p.address(q, (token * heads + head) * head_bytes), *angles)
        with p.loop(zero, kv_heads) as head:
            key, value = ((heads + head + offset) * head_bytes for offset in (zero, kv_heads))
            target = (slot * kv_heads + head) * head_bytes
            rotate(p.address(row, key), p.address(k_cache, target), *angles)
            copy(p.address(row, value), p.address(v_cache, target), 0)


@CompileOnce
def compile_rope_append(dtype: torch.dtype, head_dim: int, half: int) -> KernelSource:
    return KernelSource(
        lambda p: emit_rope_append(p, dtype, head_dim, half), "rope_append", ADDRESS_COUNT + INTEGER_COUNT
    )


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
    if qkv.dtype not in ELEMENT_TYPES or cache.k.dtype != qkv.dtype or cache.v.shape != cache.k.shape:
        return f"qkv is {qkv.dtype} and the cache {cache.k.dtype}"
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
    tensors = (qkv, cos, sin, q, cache.k, cache.v, slot)
    kernel = compile_rope_append(qkv.dtype, config.head_dim, cos.shape[-1])
    run = kernel.run_single if tokens <= SINGLE_THREAD_TOKENS else kernel
    run(*(tensor.data_ptr() for tensor in tensors), tokens, config.heads, config.kv_heads)
    return q

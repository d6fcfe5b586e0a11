"""Attention of few tokens per sequence over the paged KV cache; `attention_ir.py` has the kernel."""

from dataclasses import replace

import torch
from torch import Tensor

from localllm.quant.vectors import DTYPE_MAX, INT4
from localllm.runtime.batch import Batch
from localllm.runtime.kernels import batch_invariance
from localllm.runtime.kernels.cpu.attention_ir import (
    ADDRESS_COUNT,
    FACTOR_COUNT,
    INTEGER_COUNT,
    SCRATCH_BYTES,
    TASK_TOKENS,
    VECTOR_BYTES,
    AttentionSpec,
    emit_attention,
)
from localllm.runtime.kernels.cpu.compile import SKIPPED, CompileOnce, KernelSource, cpu_supported, float_bits
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

NO_WINDOW = 2**40  # larger than any position


@CompileOnce
def compile_attention(spec: AttentionSpec) -> KernelSource:
    return KernelSource(
        lambda p: emit_attention(p, spec), "attention", ADDRESS_COUNT + INTEGER_COUNT + FACTOR_COUNT
    )


def unsupported(q: Tensor, *stored: Tensor) -> str | None:
    """Return why the kernel does not support these queries and cache tensors, or None if it does."""
    for cache in stored:
        if not (q.is_cpu and cache.is_cpu):
            return f"the cache is on {cache.device}"
        if q.dtype not in ELEMENT_TYPES or (cache.dtype != q.dtype and cache.dtype not in DTYPE_MAX):
            return f"q is {q.dtype} and the cache {cache.dtype}"
    return None if cpu_supported() else "no kernel is compiled for this processor"


def max_short_tokens() -> int | None:
    """Maximum number of new tokens of a sequence that the kernel computes; None: any number."""
    return None if batch_invariance.batch_invariant() else TASK_TOKENS


def short_sequences(batch: Batch, max_tokens: int | None) -> list[int]:
    """Indices of the sequences with at most `max_tokens` new tokens."""
    return [i for i, span in enumerate(batch.spans) if max_tokens is None or span.count <= max_tokens]


def attention_tasks(batch: Batch, max_tokens: int | None) -> Tensor:
    """Tasks of these sequences for the kernel, [n, 4] int64, computed once per step for all layers."""
    key = max_tokens or 0
    if key not in batch.attention_tasks:
        tasks = []
        for i in short_sequences(batch, max_tokens):
            span = batch.spans[i]
            for begin in range(0, span.count, TASK_TOKENS):
                position = span.context_len - span.count + begin
                tasks.append((span.start + begin, min(TASK_TOKENS, span.count - begin), position, i))
        batch.attention_tasks[key] = torch.tensor(tasks, dtype=torch.int64)
    return batch.attention_tasks[key]


def heads_per_task(tasks: int, heads: int, kv_heads: int, threads: int) -> int:
    """Query heads of a work item: those of one key head, or fewer where threads would otherwise have no work."""
    share = heads // kv_heads
    while share % 2 == 0 and tasks * (heads // share) < threads:
        share //= 2
    return share


def attend(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    batch: Batch,
    max_tokens: int | None,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of sequences with at most `max_tokens` new tokens (None: of all) to `out`.

    q: [T, heads, d]; k: [slots, kv_heads, d], v: [slots, kv_heads, e], contiguous within a slot; out: [T, heads,
    e]; scales: of quantized keys and values, as in KVCache.
    """
    heads, kv_heads, table, threads = q.shape[1], k.shape[1], batch.block_table, torch.get_num_threads()
    tasks = attention_tasks(batch, max_tokens)
    count = tasks.shape[0]
    share = heads_per_task(count, heads, kv_heads, threads)
    has_softcap, has_sinks = softcap is not None, sinks is not None
    value_dim = v.shape[2] * (2 if v.dtype == INT4 else 1)
    spec = AttentionSpec(
        q.dtype, k.dtype, v.dtype, q.shape[2], value_dim, batch.block_size, has_softcap, has_sinks, share
    )
    kernel = compile_attention(spec)
    if kernel is SKIPPED:  # steps of more sequences divide the heads otherwise
        for other in {heads_per_task(other, heads, kv_heads, threads) for other in range(1, threads + 1)} - {
            share
        }:
            compile_attention(replace(spec, heads_per_task=other))
    record_bytes = spec.record_vectors * VECTOR_BYTES
    scratch = torch.empty(threads * (share * TASK_TOKENS * record_bytes + SCRATCH_BYTES), dtype=torch.uint8)
    q, sink_scores = q.contiguous(), None if sinks is None else sinks.float().contiguous()
    cap = softcap or 1.0
    assert out.is_contiguous() and table.is_contiguous() and table.dtype == torch.int32
    tensors = (q, k, v, *scales, out, tasks, table, scratch, sink_scores)
    kernel(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(count, heads, kv_heads, table.shape[1], window or NO_WINDOW, k.stride(0), v.stride(0)),
        *(float_bits(number) for number in (scale, cap, 1 / cap)),
    )

"""Attention of few tokens over the paged cache: the tensors that its program is called with."""

import struct

import torch
from torch import Tensor

from localllm.quant.vectors import DTYPE_MAX
from localllm.runtime.batch import Batch
from localllm.runtime.kernels import batch_invariance
from localllm.runtime.kernels.cpu.attention_ir import (
    ADDRESS_COUNT,
    FACTOR_COUNT,
    INTEGER_COUNT,
    SCRATCH_BYTES,
    TASK_TOKENS,
    AttentionSpec,
    emit_attention,
)
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce, cpu_supported
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

NO_WINDOW = 2**40  # more positions than there are


@CompileOnce
def compile_attention(form: AttentionSpec) -> CompiledKernel:
    return CompiledKernel(
        lambda p: emit_attention(p, form), "attend", ADDRESS_COUNT + INTEGER_COUNT + FACTOR_COUNT
    )


def unsupported(q: Tensor, stored: Tensor) -> str | None:
    """Why it does not take such queries and such a cache, if so."""
    if not (q.is_cpu and stored.is_cpu):
        return f"the cache is on {stored.device}"
    if q.dtype not in ELEMENT_TYPES or (stored.dtype != q.dtype and stored.dtype not in DTYPE_MAX):
        return f"q is {q.dtype} and the cache {stored.dtype}"
    return None if cpu_supported() else "no kernel is compiled for this processor"


def max_short_tokens() -> int | None:
    """Of a sequence that the program is for; None: it is for all."""
    return None if batch_invariance.batch_invariant() else TASK_TOKENS


def short_sequences(batch: Batch, max_tokens: int | None) -> list[int]:
    """Sequences that bring at most so many tokens."""
    return [i for i, span in enumerate(batch.spans) if max_tokens is None or span.count <= max_tokens]


def attention_tasks(batch: Batch, max_tokens: int | None) -> Tensor:
    """[n, 4] int64, as the program takes them, of these sequences; made once a step for all layers."""
    key = max_tokens or 0
    if key not in batch.attention_tasks:
        found = []
        for i in short_sequences(batch, max_tokens):
            span = batch.spans[i]
            for begin in range(0, span.count, TASK_TOKENS):
                position = span.context_len - span.count + begin
                found.append((span.start + begin, min(TASK_TOKENS, span.count - begin), position, i))
        batch.attention_tasks[key] = torch.tensor(found, dtype=torch.int64)
    return batch.attention_tasks[key]


def attend(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    batch: Batch,
    max_tokens: int | None,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Writes the results of sequences with at most so many tokens (None: of all).

    q: [T, heads, d]; k: [slots, kv_heads, d], v: [slots, kv_heads, e], rows of a head without gaps; out: [T,
    heads, e]; scales: [slots, kv_heads] bfloat16, of keys and of values in 8 bits.
    """
    heads, kv_heads, table, parts = q.shape[1], k.shape[1], batch.block_table, torch.get_num_threads()
    wanted, share = attention_tasks(batch, max_tokens), heads // kv_heads
    while share % 2 == 0 and len(wanted) * (heads // share) < parts:
        share //= 2  # of few heads of keys each thread takes some of the queries'
    capped, sunk = softcap is not None, sinks is not None
    form = AttentionSpec(q.dtype, k.dtype, q.shape[2], v.shape[2], batch.block_size, capped, sunk, share)
    scratch = torch.empty(
        parts * (share * TASK_TOKENS * form.record_vectors * 64 + SCRATCH_BYTES), dtype=torch.uint8
    )
    q, gates = q.contiguous(), None if sinks is None else sinks.float().contiguous()
    k_scale, v_scale = scales or (None, None)
    cap = softcap or 1.0
    assert out.is_contiguous() and table.is_contiguous() and table.dtype == torch.int32
    compile_attention(form)(
        *(0 if each is None else each.data_ptr() for each in (q, k, v, k_scale, v_scale, out, wanted, table)),
        *(scratch.data_ptr(), 0 if gates is None else gates.data_ptr()),
        *(len(wanted), heads, kv_heads, table.shape[1], window or NO_WINDOW, k.stride(0), v.stride(0)),
        *(float_bits(number) for number in (scale, cap, 1 / cap)),
    )


def float_bits(number: float) -> int:
    """A count that holds a float32."""
    return struct.unpack("<q", struct.pack("<fi", number, 0))[0]

"""Attention of few tokens over the paged cache: the tensors that its program is called with."""

import struct

import torch
from torch import Tensor

from localllm.quant.vectors import MOST
from localllm.runtime.batch import Batch
from localllm.runtime.cache import LayerCache
from localllm.runtime.kernels import forms
from localllm.runtime.kernels.cpu.attending import ADDRESSES, BESIDE, COUNTS, FACTORS, TOKENS, Form, attend
from localllm.runtime.kernels.cpu.compile import Compiled, Once, runs_here
from localllm.runtime.kernels.cpu.layout import KINDS

NO_WINDOW = 2**40  # more positions than there are


@Once
def program(form: Form) -> Compiled:
    return Compiled(lambda p: attend(p, form), "attend", ADDRESSES + COUNTS + FACTORS)


def refuses(q: Tensor, stored: Tensor) -> str | None:
    """Why it does not take such queries and such a cache, if so."""
    if not (q.is_cpu and stored.is_cpu):
        return f"the cache is on {stored.device}"
    if q.dtype not in KINDS or (stored.dtype != q.dtype and stored.dtype not in MOST):
        return f"q is {q.dtype} and the cache {stored.dtype}"
    return None if runs_here() else "no kernel is compiled for this processor"


def most_tokens() -> int | None:
    """Of a sequence that the program is for; None: it is for all."""
    return None if forms.by_row_alone() else TOKENS


def few(batch: Batch, most: int | None) -> list[int]:
    """Sequences that bring at most so many tokens."""
    return [i for i, span in enumerate(batch.spans) if most is None or span.count <= most]


def tasks(batch: Batch, most: int | None) -> Tensor:
    """[n, 4] int64, as the program takes them, of these sequences; made once a step for all layers."""
    key = most or 0
    if key not in batch.tasks:
        found = []
        for i in few(batch, most):
            span = batch.spans[i]
            for begin in range(0, span.count, TOKENS):
                position = span.context_len - span.count + begin
                found.append((span.start + begin, min(TOKENS, span.count - begin), position, i))
        batch.tasks[key] = torch.tensor(found, dtype=torch.int64)
    return batch.tasks[key]


def write(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    batch: Batch,
    most: int | None,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Writes the results of sequences with at most so many tokens (None: of all).

    q: [T, heads, d]; k: [slots, kv_heads, d], v: [slots, kv_heads, e], rows of a head without gaps; out: [T, heads,
    e]; scales: [slots, kv_heads] bfloat16, of keys and of values in 8 bits.
    """
    heads, kv_heads, table, parts = q.shape[1], k.shape[1], batch.block_table, torch.get_num_threads()
    wanted, share = tasks(batch, most), heads // kv_heads
    while share % 2 == 0 and len(wanted) * (heads // share) < parts:
        share //= 2  # of few heads of keys each thread takes some of the queries'
    capped, sunk = softcap is not None, sinks is not None
    form = Form(q.dtype, k.dtype, q.shape[2], v.shape[2], batch.block_size, capped, sunk, share)
    scratch = torch.empty(parts * (share * TOKENS * form.vectors * 64 + BESIDE), dtype=torch.uint8)
    q, gates = q.contiguous(), None if sinks is None else sinks.float().contiguous()
    k_scale, v_scale = scales or (None, None)
    cap = softcap or 1.0
    assert out.is_contiguous() and table.is_contiguous() and table.dtype == torch.int32
    program(form)(
        *(0 if each is None else each.data_ptr() for each in (q, k, v, k_scale, v_scale, out, wanted, table)),
        *(scratch.data_ptr(), 0 if gates is None else gates.data_ptr()),
        *(len(wanted), heads, kv_heads, table.shape[1], window or NO_WINDOW, k.stride(0), v.stride(0)),
        *(bits(number) for number in (scale, cap, 1 / cap)),
    )


def bits(number: float) -> int:
    """A count that holds a float32."""
    return struct.unpack("<q", struct.pack("<fi", number, 0))[0]

"""softmax(q k^T * scale) v for each sequence over its own blocks, causal; with a window, a softcap, sinks or none.

q: [T, heads, head_dim], k and v in the cache: [slots, kv_heads, head_dim]. A token at position i sees j with
i - window < j <= i. A softcap bends scores to c * tanh(score / c) (Gemma 2); a sink is one more logit of a head
in the softmax, without a value (gpt-oss).

Bytes read by a decode step: 2 * context * kv_heads * head_dim * itemsize.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.runtime.batch import Batch, Span
from localllm.runtime.cache import KVCache
from localllm.runtime.kernels.registry import choose, kernel

SCORES_AT_ONCE = 2**23  # 32 MB in float32


def attention(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None = None
) -> Tensor:
    """q: [T, heads, head_dim]; sinks: [heads] -> the shape of q"""
    return choose("attention", q, cache, batch, config, sinks).run(q, cache, batch, config, sinks)


def plain_softmax(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if sinks is not None:
        return "it has sinks"
    return "its scores are capped" if config.softcap else None


@kernel("attention", "torch-sdpa", plain_softmax)
def attention_sdpa(q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: None) -> Tensor:
    """torch's fused attention, sequence by sequence, on slices of the cache where the blocks are neighbours."""
    out = torch.empty_like(q)
    for i, span in enumerate(batch.spans):
        mine = slice(span.start, span.start + span.count)
        first = first_visible(span, config.window)
        k, v = (rows.transpose(0, 1)[None] for rows in visible(cache, batch, i, first))  # [1, kv_heads, n, d]
        if span.count == 1:
            # The query heads of a group as rows of one product: 12x faster than enable_gqa at 512 tokens.
            grouped = q[mine].view(1, config.kv_heads, -1, config.head_dim)
            out[mine] = F.scaled_dot_product_attention(grouped, k, v, scale=config.scale).view_as(q[mine])
            continue
        whole = span.count == span.context_len <= (config.window or span.context_len)
        mask = None if whole else visibility(batch, span, first, config.window)
        out[mine] = F.scaled_dot_product_attention(
            q[mine].transpose(0, 1)[None], k, v, mask, is_causal=whole, scale=config.scale, enable_gqa=True
        )[0].transpose(0, 1)
    return out


@kernel("attention", "torch-matmul")
def attention_matmul(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Scores written out, a few queries at a time so that they stay small."""
    out = torch.empty_like(q)
    for i, span in enumerate(batch.spans):
        first = first_visible(span, config.window)
        k, v = (rows.transpose(0, 1) for rows in visible(cache, batch, i, first))  # [kv_heads, n, d]
        mask = visibility(batch, span, first, config.window)
        most = max(1, SCORES_AT_ONCE // (config.heads * k.shape[1]))
        for begin in range(0, span.count, most):
            end = min(begin + most, span.count)
            mine = slice(span.start + begin, span.start + end)
            out[mine] = mixed(q[mine], k, v, mask[begin:end], config.scale, config.softcap, sinks)
    return out


def mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q: [q, heads, d]; k: [kv_heads, n, d]; v: [kv_heads, n, e]; mask: [q, n] -> [q, heads, e]"""
    kv_heads, count = len(k), len(q)
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, q, d]
    score = (grouped.flatten(1, 2) @ k.transpose(1, 2)).float().unflatten(1, (-1, count)) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score.masked_fill_(~mask, -torch.inf)
    weight = softmax(score, sinks.view(kv_heads, -1, 1, 1) if sinks is not None else None)
    out = weight.flatten(1, 2).to(v.dtype) @ v  # [kv_heads, group * q, e]
    return out.unflatten(1, (-1, count)).permute(2, 0, 1, 3).flatten(1, 2)


def softmax(score: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension; sinks: one more logit, of the shape of score but for its last dimension."""
    if sinks is None:
        return score.softmax(-1)
    widened = torch.cat((score, sinks.float().expand(*score.shape[:-1], 1)), -1)
    return widened.softmax(-1)[..., :-1]


def first_visible(span: Span, window: int | None) -> int:
    """The first position that any of the span's tokens sees."""
    return max(0, span.context_len - span.count + 1 - window) if window else 0


def visible(cache: KVCache, batch: Batch, index: int, first: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions first .. context_len - 1: [n, kv_heads, head_dim] each."""
    return rows_of(cache.k, batch, index, first), rows_of(cache.v, batch, index, first)


def rows_of(stored: Tensor, batch: Batch, index: int, first: int) -> Tensor:
    """stored: [slots, ...] -> [n, ...] of positions first .. context_len - 1; a view where the blocks are
    neighbours."""
    span = batch.spans[index]
    if span.first_slot is not None:
        return stored[span.first_slot + first : span.first_slot + span.context_len]
    size = batch.block_size
    blocks = batch.block_table[index, first // size : -(-span.context_len // size)]
    # Whole blocks are copied, several times faster than single slots.
    gathered = stored.unflatten(0, (-1, size)).index_select(0, blocks).flatten(0, 1)
    return gathered[first % size : first % size + span.context_len - first]


def visibility(batch: Batch, span: Span, first: int, window: int | None) -> Tensor:
    """[count, context_len - first] bool: may the query see the key? Made once a step for all layers."""
    key = (span.start, window)
    if key not in batch.masks:
        positions = batch.positions[span.start : span.start + span.count, None]
        keys = torch.arange(first, span.context_len, device=positions.device)
        seen = positions >= keys
        batch.masks[key] = seen & (positions - window < keys) if window else seen
    return batch.masks[key]


@kernel("attention", "reference")
def attention_reference(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """The formula, written out over the block table."""
    out = torch.empty_like(q)
    start, context, size = batch.query_start.tolist(), batch.context_len.tolist(), batch.block_size
    for i, length in enumerate(context):
        mine = slice(start[i], start[i + 1])
        slots = (batch.block_table[i][:, None] * size + torch.arange(size, device=q.device)).flatten()[:length]
        k, v = (rows[slots].repeat_interleave(config.heads // config.kv_heads, 1) for rows in (cache.k, cache.v))
        score = torch.einsum("qhd,khd->hqk", q[mine], k) * config.scale
        if config.softcap:
            score = config.softcap * torch.tanh(score / config.softcap)
        distance = batch.positions[mine][:, None] - torch.arange(length, device=q.device)
        hidden = distance < 0
        if config.window:
            hidden |= distance >= config.window
        weight = softmax(
            score.masked_fill(hidden, -torch.inf), sinks[:, None, None] if sinks is not None else None
        )
        out[mine] = torch.einsum("hqk,khd->qhd", weight.to(v.dtype), v)
    return out

"""softmax(q k^T * scale) v for each sequence over its own blocks: causal, with optional window, softcap and sinks.

q: [T, heads, head_dim], k and v in the cache: [slots, kv_heads, head_dim]. A token at position i attends to j with
i - window < j <= i. A softcap limits scores to c * tanh(score / c) (Gemma 2); a sink is an additional logit of a
head in the softmax, without a value (gpt-oss).

Bytes read by a decode step: 2 * context * kv_heads * head_dim * itemsize, in 8 bits 2 more per vector, in 4 bits
4 more. A quantized cache is dequantized when it is read, at most the part that one sequence attends to.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.quant.vectors import INT4, dequantize_vectors, to_float32
from localllm.runtime.batch import Batch, SequenceSpan
from localllm.runtime.kernels.cpu import attention as own
from localllm.runtime.kernels.elementwise import sigmoid
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import choose, dispatch, kernel
from localllm.runtime.kernels.rope_append import Angles, rope_append
from localllm.runtime.kernels.threads import run_in_parts
from localllm.runtime.kv_cache.tensors import KVCache, as_bits

MAX_SCORES = 2**23  # 32 MB in float32
TILE_ELEMENTS = 2**18  # elements of keys that are converted at once: 1 MB of float32, in a core's own cache


def attention(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None = None
) -> Tensor:
    """Attend to the cache. q: [T, heads, head_dim]; sinks: [heads] -> the shape of q"""
    return choose("attention", q, cache, batch, config, sinks).run(q, cache, batch, config, sinks)


def append_and_attend(
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
    """Append to the cache and attend to it, times the sigmoid of gates: [T, heads, head_dim].

    Arguments are those of `rope_append`, and the sinks of `attention`.
    """
    return dispatch("append_and_attend", qkv, cache, batch, config, angles, q_norm, k_norm, eps, sinks)


@kernel("append_and_attend", "reference")
def append_and_attend_reference(
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
    q, gate = rope_append(qkv, cache, batch, config, angles, q_norm, k_norm, eps)
    mixed = attention(q, cache, batch, config, sinks)
    return mixed if gate is None else mixed * sigmoid(gate)


def cpu_tokens_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if reason := own.unsupported(q, cache.k, cache.v):
        return reason
    return None if own.short_sequences(batch, own.max_short_tokens()) else "every sequence has many new tokens"


@kernel("attention", "cpu-tokens", cpu_tokens_unsupported)
def attention_tokens(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Process sequences with a few new tokens token by token, and the others with torch.

    The result of such a token does not depend on the other tokens of the step.
    """
    c, max_tokens, output = config, own.max_short_tokens(), q.new_empty(q.shape)
    attend_many = attend_matmul if sdpa_unsupported(q, cache, batch, config, sinks) else attend_sdpa
    for i, span in enumerate(batch.spans):
        if max_tokens is not None and span.count > max_tokens:
            attend_many(output, q, cache, batch, i, config, sinks)
    scales, cap = (cache.k_scale, cache.v_scale), c.softcap or None
    own.attend(
        output, q, cache.k, cache.v, scales, batch, max_tokens, c.scale, window=c.window, softcap=cap, sinks=sinks
    )
    return output


def cpu_8bit_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if cache.k_scale is None:
        return f"the cache is in {cache.k.dtype}"
    if INT4 in (cache.k.dtype, cache.v.dtype):
        return "the cache is in 4 bits"
    if cache.k.device.type != "cpu":
        return "tiles only save cache of a CPU"
    return None if any(span.count == 1 for span in batch.spans) else "no sequence has a single new token"


@kernel("attention", "8-bit-tiles", cpu_8bit_unsupported)
def attention_8bit_tiles(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Process single tokens in tiles that are converted and used within a core's cache.

    For several tokens of a sequence, all keys and values that they attend to are dequantized once.
    """
    out = torch.empty_like(q)
    attend_many = attend_matmul if sdpa_unsupported(q, cache, batch, config, sinks) else attend_sdpa
    for i, span in enumerate(batch.spans):
        (attend_tiles if span.count == 1 else attend_many)(out, q, cache, batch, i, config, sinks)
    return out


def attend_tiles(
    out: Tensor, q: Tensor, cache: KVCache, batch: Batch, index: int, c: AttentionConfig, sinks: Tensor | None
) -> None:
    """Attend with one query, with a running softmax in float32 (Milakov and Gimelshein 2018).

    Scales are applied to scores and weights, which are fewer than keys and values. Each thread processes its own
    heads.
    """
    span = batch.spans[index]
    first = first_visible_position(span, c.window)
    grouped = q[span.start].float().view(c.kv_heads, -1, c.head_dim) * c.scale
    target = out[span.start].view_as(grouped)
    tile = max(1, TILE_ELEMENTS // (c.kv_heads * c.head_dim))  # tokens

    def attend_heads(part: int, parts: int) -> None:
        heads = slice(part * c.kv_heads // parts, (part + 1) * c.kv_heads // parts)
        if heads.start == heads.stop:
            return
        query = grouped[heads]  # [kv_heads, group, d]
        # A sink acts like a logit that came before all others.
        max_score = sinks.float().view(c.kv_heads, -1, 1)[heads] if sinks is not None else None
        total = torch.ones_like(max_score) if max_score is not None else 0.0
        mixed = torch.zeros_like(query)
        for begin in range(first, span.context_len, tile):
            k, v, k_scale, v_scale = (
                read_positions(cached, batch, index, begin, min(begin + tile, span.context_len))[:, heads]
                for cached in (cache.k, cache.v, cache.k_scale, cache.v_scale)
                if cached is not None
            )
            score = (query @ to_float32(k).permute(1, 2, 0)).mul_(k_scale.float().t()[:, None])
            if c.softcap:
                score = score.div_(c.softcap).tanh_().mul_(c.softcap)
            new_max = score.amax(-1, keepdim=True)
            if max_score is not None:
                new_max = torch.maximum(max_score, new_max)
                rescale = (max_score - new_max).exp_()
                total, mixed = total * rescale, mixed.mul_(rescale)
            weight, max_score = score.sub_(new_max).exp_(), new_max
            total = total + weight.sum(-1, keepdim=True)
            mixed.baddbmm_(weight.mul_(v_scale.float().t()[:, None]), to_float32(v).transpose(0, 1))
        target[heads] = (mixed / total).to(out.dtype)

    if span.context_len - first <= tile:
        attend_heads(0, 1)  # faster than starting threads
    else:
        run_in_parts(attend_heads)


def sdpa_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if sinks is not None:
        return "it has sinks"
    return "its scores are capped" if config.softcap else None


@kernel("attention", "torch-sdpa", sdpa_unsupported)
def attention_sdpa(q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: None) -> Tensor:
    """Call torch's fused attention per sequence, on slices of the cache if its blocks are adjacent."""
    out = torch.empty_like(q)
    for i in range(len(batch.spans)):
        attend_sdpa(out, q, cache, batch, i, config, None)
    return out


def attend_sdpa(
    out: Tensor, q: Tensor, cache: KVCache, batch: Batch, index: int, c: AttentionConfig, _: Tensor | None
) -> None:
    """Write the result of one sequence to `out`. It does not support sinks."""
    span = batch.spans[index]
    token_slice = slice(span.start, span.start + span.count)
    first = first_visible_position(span, c.window)
    k, v = (
        cached.transpose(0, 1)[None] for cached in read_keys_values(cache, batch, index, first, q.dtype)
    )  # [1, heads, n, d]
    if span.count == 1:
        # Treating the query heads of a group as rows of one product is 12x faster than enable_gqa at 512 tokens.
        grouped = q[token_slice].view(1, c.kv_heads, -1, c.head_dim)
        out[token_slice] = F.scaled_dot_product_attention(grouped, k, v, scale=c.scale).view_as(q[token_slice])
        return
    is_full_causal = span.count == span.context_len <= (c.window or span.context_len)
    mask = None if is_full_causal else attention_mask(batch, span, first, c.window)
    out[token_slice] = F.scaled_dot_product_attention(
        q[token_slice].transpose(0, 1)[None], k, v, mask, is_causal=is_full_causal, scale=c.scale, enable_gqa=True
    )[0].transpose(0, 1)


@kernel("attention", "torch-matmul")
def attention_matmul(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Compute scores explicitly, a few queries at a time to keep them small."""
    out = torch.empty_like(q)
    for i in range(len(batch.spans)):
        attend_matmul(out, q, cache, batch, i, config, sinks)
    return out


def attend_matmul(
    out: Tensor, q: Tensor, cache: KVCache, batch: Batch, index: int, c: AttentionConfig, sinks: Tensor | None
) -> None:
    """Write the result of one sequence to `out`."""
    span = batch.spans[index]
    first = first_visible_position(span, c.window)
    k, v = (
        cached.transpose(0, 1) for cached in read_keys_values(cache, batch, index, first, q.dtype)
    )  # [kv_heads, n, d]
    mask = attention_mask(batch, span, first, c.window)
    max_queries = max(1, MAX_SCORES // (c.heads * k.shape[1]))
    for begin in range(0, span.count, max_queries):
        end = min(begin + max_queries, span.count)
        token_slice = slice(span.start + begin, span.start + end)
        out[token_slice] = masked_attention(q[token_slice], k, v, mask[begin:end], c.scale, c.softcap, sinks)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with an explicit mask. q: [q, heads, d]; k: [kv_heads, n, d]; v: [kv_heads, n, e]; mask: [q, n]

    Returns [q, heads, e].
    """
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
    """Softmax over the last dimension. sinks: an additional logit, with the shape of score[..., 0:1]."""
    if sinks is None:
        return score.softmax(-1)
    with_sinks = torch.cat((score, sinks.float().expand(*score.shape[:-1], 1)), -1)
    return with_sinks.softmax(-1)[..., :-1]


def first_visible_position(span: SequenceSpan, window: int | None) -> int:
    """Return the first position that any token of the span attends to."""
    return max(0, span.context_len - span.count + 1 - window) if window else 0


def read_keys_values(
    cache: KVCache, batch: Batch, index: int, first: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values of positions first .. context_len - 1: [n, kv_heads, head_dim] each.

    If they are quantized, they are dequantized to `dtype`.
    """

    def read(stored: Tensor, scale: Tensor | None) -> Tensor:
        vectors = read_positions(stored, batch, index, first)
        return (
            vectors
            if scale is None
            else dequantize_vectors(vectors, read_positions(scale, batch, index, first), dtype)
        )

    return read(cache.k, cache.k_scale), read(cache.v, cache.v_scale)


def read_positions(stored: Tensor, batch: Batch, index: int, first: int, end: int | None = None) -> Tensor:
    """Return [n, ...] of positions first .. end - 1 of stored [slots, ...]; a view if the blocks are adjacent.

    end: None for the end of the context.
    """
    span = batch.spans[index]
    end = span.context_len if end is None else end
    if span.first_slot is not None:
        return stored[span.first_slot + first : span.first_slot + end]
    size = batch.block_size
    blocks = batch.block_table[index, first // size : -(-end // size)]
    # Copying whole blocks is several times faster than copying single slots.
    gathered = as_bits(stored).unflatten(0, (-1, size)).index_select(0, blocks).view(stored.dtype).flatten(0, 1)
    return gathered[first % size : first % size + end - first]


def attention_mask(batch: Batch, span: SequenceSpan, first: int, window: int | None) -> Tensor:
    """Return [count, context_len - first] bool: whether a query attends to a key. Computed once per step."""
    key = (span.start, window)
    if key not in batch.attention_masks:
        positions = batch.positions[span.start : span.start + span.count, None]
        keys = torch.arange(first, span.context_len, device=positions.device)
        visible = positions >= keys
        batch.attention_masks[key] = visible & (positions - window < keys) if window else visible
    return batch.attention_masks[key]


@kernel("attention", "reference")
def attention_reference(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Compute the formula literally over the block table."""
    out = torch.empty_like(q)
    start, context, size = batch.query_start.tolist(), batch.context_len.tolist(), batch.block_size
    for i, length in enumerate(context):
        token_slice = slice(start[i], start[i + 1])
        slots = (batch.block_table[i][:, None] * size + torch.arange(size, device=q.device)).flatten()[:length]
        k, v = (
            read_slots(cache.k, cache.k_scale, slots, q.dtype),
            read_slots(cache.v, cache.v_scale, slots, q.dtype),
        )
        k, v = (cached.repeat_interleave(config.heads // config.kv_heads, 1) for cached in (k, v))
        score = torch.einsum("qhd,khd->hqk", q[token_slice], k) * config.scale
        if config.softcap:
            score = config.softcap * torch.tanh(score / config.softcap)
        distance = batch.positions[token_slice][:, None] - torch.arange(length, device=q.device)
        hidden = distance < 0
        if config.window:
            hidden |= distance >= config.window
        weight = softmax(
            score.masked_fill(hidden, -torch.inf), sinks[:, None, None] if sinks is not None else None
        )
        out[token_slice] = torch.einsum("hqk,khd->qhd", weight.to(v.dtype), v)
    return out


def read_slots(stored: Tensor, scale: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    vectors = as_bits(stored)[slots].view(stored.dtype)
    return vectors if scale is None else dequantize_vectors(vectors, scale[slots], dtype)

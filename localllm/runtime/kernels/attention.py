"""softmax(q k^T * scale) v for each sequence over its own blocks, causal; with a window, a softcap, sinks or none.

q: [T, heads, head_dim], k and v in the cache: [slots, kv_heads, head_dim]. A token at position i sees j with
i - window < j <= i. A softcap bends scores to c * tanh(score / c) (Gemma 2); a sink is one more logit of a head
in the softmax, without a value (gpt-oss).

Bytes read by a decode step: 2 * context * kv_heads * head_dim * itemsize, in 8 bits 2 more a vector.
A cache in 8 bits is dequantized as it is read, never more of it than one sequence sees.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.quant.vectors import dequantize_vectors, to_float32
from localllm.runtime.batch import Batch, SequenceSpan
from localllm.runtime.kernels.cpu import attention as own
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kernels.threads import run_in_parts
from localllm.runtime.kv_cache.tensors import KVCache, as_bits

MAX_SCORES = 2**23  # 32 MB in float32
TILE_ELEMENTS = 2**18  # numbers of keys that are widened at once: 1 MB of float32, in a core's own cache


def attention(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None = None
) -> Tensor:
    """q: [T, heads, head_dim]; sinks: [heads] -> the shape of q"""
    return choose("attention", q, cache, batch, config, sinks).run(q, cache, batch, config, sinks)


def cpu_tokens_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if reason := own.unsupported(q, cache.k):
        return reason
    return None if own.short_sequences(batch, own.max_short_tokens()) else "every sequence brings many tokens"


@kernel("attention", "cpu-tokens", cpu_tokens_unsupported)
def attention_tokens(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Sequences that bring a few tokens token by token, so that a token's result does not depend on those that
    came with it; the others as elsewhere."""
    c, most, out = config, own.max_short_tokens(), q.new_empty(q.shape)
    several = attend_matmul if sdpa_unsupported(q, cache, batch, config, sinks) else attend_sdpa
    for i, span in enumerate(batch.spans):
        if most is not None and span.count > most:
            several(out, q, cache, batch, i, config, sinks)
    scales = None if cache.k_scale is None or cache.v_scale is None else (cache.k_scale, cache.v_scale)
    cap = c.softcap or None
    own.attend(out, q, cache.k, cache.v, scales, batch, most, c.scale, window=c.window, softcap=cap, sinks=sinks)
    return out


def cpu_8bit_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if cache.k_scale is None:
        return f"the cache is in {cache.k.dtype}"
    if cache.k.device.type != "cpu":
        return "the device has no cache to be spared"
    return None if any(span.count == 1 for span in batch.spans) else "no sequence brings a single token"


@kernel("attention", "8-bit-tiles", cpu_8bit_unsupported)
def attention_8bit_tiles(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Single tokens over tiles that are widened, used and forgotten in a core's own cache; several tokens of a
    sequence over all that they see, dequantized once."""
    out = torch.empty_like(q)
    several = attend_matmul if sdpa_unsupported(q, cache, batch, config, sinks) else attend_sdpa
    for i, span in enumerate(batch.spans):
        (attend_tiles if span.count == 1 else several)(out, q, cache, batch, i, config, sinks)
    return out


def attend_tiles(
    out: Tensor, q: Tensor, cache: KVCache, batch: Batch, index: int, c: AttentionConfig, sinks: Tensor | None
) -> None:
    """One query, with a running softmax in float32 (Milakov and Gimelshein 2018). Scales go to scores and weights,
    which are fewer than keys and values; each thread has its own heads."""
    span = batch.spans[index]
    first = first_visible_position(span, c.window)
    grouped = q[span.start].float().view(c.kv_heads, -1, c.head_dim) * c.scale
    written = out[span.start].view_as(grouped)
    tile = max(1, TILE_ELEMENTS // (c.kv_heads * c.head_dim))  # tokens

    def some(part: int, parts: int) -> None:
        mine = slice(part * c.kv_heads // parts, (part + 1) * c.kv_heads // parts)
        if mine.start == mine.stop:
            return
        query = grouped[mine]  # [kv_heads, group, d]
        # A sink is a logit that has been seen before all others.
        most = sinks.float().view(c.kv_heads, -1, 1)[mine] if sinks is not None else None
        total = torch.ones_like(most) if most is not None else 0.0
        mixed = torch.zeros_like(query)
        for begin in range(first, span.context_len, tile):
            k, v, k_scale, v_scale = (
                read_positions(rows, batch, index, begin, min(begin + tile, span.context_len))[:, mine]
                for rows in (cache.k, cache.v, cache.k_scale, cache.v_scale)
                if rows is not None
            )
            score = (query @ to_float32(k).permute(1, 2, 0)).mul_(k_scale.float().t()[:, None])
            if c.softcap:
                score = score.div_(c.softcap).tanh_().mul_(c.softcap)
            largest = score.amax(-1, keepdim=True)
            if most is not None:
                largest = torch.maximum(most, largest)
                fading = (most - largest).exp_()
                total, mixed = total * fading, mixed.mul_(fading)
            weight, most = score.sub_(largest).exp_(), largest
            total = total + weight.sum(-1, keepdim=True)
            mixed.baddbmm_(weight.mul_(v_scale.float().t()[:, None]), to_float32(v).transpose(0, 1))
        written[mine] = (mixed / total).to(out.dtype)

    if span.context_len - first <= tile:
        some(0, 1)  # sooner done than shared out
    else:
        run_in_parts(some)


def sdpa_unsupported(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> str | None:
    if sinks is not None:
        return "it has sinks"
    return "its scores are capped" if config.softcap else None


@kernel("attention", "torch-sdpa", sdpa_unsupported)
def attention_sdpa(q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: None) -> Tensor:
    """torch's fused attention, sequence by sequence, on slices of the cache where the blocks are neighbours."""
    out = torch.empty_like(q)
    for i in range(len(batch.spans)):
        attend_sdpa(out, q, cache, batch, i, config, None)
    return out


def attend_sdpa(
    out: Tensor, q: Tensor, cache: KVCache, batch: Batch, index: int, c: AttentionConfig, _: Tensor | None
) -> None:
    """Writes the results of one sequence, which has no sinks."""
    span = batch.spans[index]
    mine = slice(span.start, span.start + span.count)
    first = first_visible_position(span, c.window)
    k, v = (
        rows.transpose(0, 1)[None] for rows in read_keys_values(cache, batch, index, first, q.dtype)
    )  # [1, heads, n, d]
    if span.count == 1:
        # The query heads of a group as rows of one product: 12x faster than enable_gqa at 512 tokens.
        grouped = q[mine].view(1, c.kv_heads, -1, c.head_dim)
        out[mine] = F.scaled_dot_product_attention(grouped, k, v, scale=c.scale).view_as(q[mine])
        return
    whole = span.count == span.context_len <= (c.window or span.context_len)
    mask = None if whole else attention_mask(batch, span, first, c.window)
    out[mine] = F.scaled_dot_product_attention(
        q[mine].transpose(0, 1)[None], k, v, mask, is_causal=whole, scale=c.scale, enable_gqa=True
    )[0].transpose(0, 1)


@kernel("attention", "torch-matmul")
def attention_matmul(
    q: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """Scores written out, a few queries at a time so that they stay small."""
    out = torch.empty_like(q)
    for i in range(len(batch.spans)):
        attend_matmul(out, q, cache, batch, i, config, sinks)
    return out


def attend_matmul(
    out: Tensor, q: Tensor, cache: KVCache, batch: Batch, index: int, c: AttentionConfig, sinks: Tensor | None
) -> None:
    """Writes the results of one sequence."""
    span = batch.spans[index]
    first = first_visible_position(span, c.window)
    k, v = (
        rows.transpose(0, 1) for rows in read_keys_values(cache, batch, index, first, q.dtype)
    )  # [kv_heads, n, d]
    mask = attention_mask(batch, span, first, c.window)
    most = max(1, MAX_SCORES // (c.heads * k.shape[1]))
    for begin in range(0, span.count, most):
        end = min(begin + most, span.count)
        mine = slice(span.start + begin, span.start + end)
        out[mine] = masked_attention(q[mine], k, v, mask[begin:end], c.scale, c.softcap, sinks)


def masked_attention(
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


def first_visible_position(span: SequenceSpan, window: int | None) -> int:
    """The first position that any of the span's tokens sees."""
    return max(0, span.context_len - span.count + 1 - window) if window else 0


def read_keys_values(
    cache: KVCache, batch: Batch, index: int, first: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions first .. context_len - 1: [n, kv_heads, head_dim] each; in `dtype` if they
    are kept in 8 bits."""
    k, v = read_positions(cache.k, batch, index, first), read_positions(cache.v, batch, index, first)
    if cache.k_scale is None or cache.v_scale is None:
        return k, v
    scales = (
        read_positions(cache.k_scale, batch, index, first),
        read_positions(cache.v_scale, batch, index, first),
    )
    return dequantize_vectors(k, scales[0], dtype), dequantize_vectors(v, scales[1], dtype)


def read_positions(stored: Tensor, batch: Batch, index: int, first: int, end: int | None = None) -> Tensor:
    """stored: [slots, ...] -> [n, ...] of positions first .. end - 1, or of all from first on; a view where its
    blocks are neighbours."""
    span = batch.spans[index]
    end = span.context_len if end is None else end
    if span.first_slot is not None:
        return stored[span.first_slot + first : span.first_slot + end]
    size = batch.block_size
    blocks = batch.block_table[index, first // size : -(-end // size)]
    # Whole blocks are copied, several times faster than single slots.
    gathered = as_bits(stored).unflatten(0, (-1, size)).index_select(0, blocks).view(stored.dtype).flatten(0, 1)
    return gathered[first % size : first % size + end - first]


def attention_mask(batch: Batch, span: SequenceSpan, first: int, window: int | None) -> Tensor:
    """[count, context_len - first] bool: may the query see the key? Made once a step for all layers."""
    key = (span.start, window)
    if key not in batch.attention_masks:
        positions = batch.positions[span.start : span.start + span.count, None]
        keys = torch.arange(first, span.context_len, device=positions.device)
        seen = positions >= keys
        batch.attention_masks[key] = seen & (positions - window < keys) if window else seen
    return batch.attention_masks[key]


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
        k, v = (
            read_slots(cache.k, cache.k_scale, slots, q.dtype),
            read_slots(cache.v, cache.v_scale, slots, q.dtype),
        )
        k, v = (rows.repeat_interleave(config.heads // config.kv_heads, 1) for rows in (k, v))
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


def read_slots(stored: Tensor, scale: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    rows = as_bits(stored)[slots].view(stored.dtype)
    return rows if scale is None else dequantize_vectors(rows, scale[slots], dtype)

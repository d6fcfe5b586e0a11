"""Latent attention: softmax(q k^T * scale) v, where every head's k and v are made from the latents of the cache.

q: [T, heads, nope_dim + rope_dim]; rows in the cache: [slots, rank + rope_dim], the latent c and one rotated key r
for all heads; k_b: [heads, nope_dim, rank]; v_b: [heads, value_dim, rank]. A head's key is (k_b c, r), its value
v_b c. Two forms give the same numbers (DeepSeek-V2, section 2.1.2 and appendix C):

    expanded   makes the keys and values of all positions that are seen, then attends as usual: many queries
    absorbed   (k_b^T q)·c = q·(k_b c): moves k_b to the query and v_b to the result, and attends to the latents
               themselves, as if they were one key-value head: few queries

Bytes read by a decode step: context * (rank + rope_dim) * itemsize (in 8 bits 4 more a token), k_b and v_b.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import LatentConfig
from localllm.quant.vectors import dequantize_vectors
from localllm.runtime.batch import Batch, SequenceSpan
from localllm.runtime.kernels.attention import MAX_SCORES, attention_mask, masked_attention, read_positions
from localllm.runtime.kernels.cpu import attention as own
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kv_cache.tensors import LatentCache, as_bits

MAX_EXPANDED_ELEMENTS = 2**25  # numbers in the keys of so many heads: 128 MB in float32


def latent_attention(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """-> [T, heads, value_dim]"""
    chosen = choose("latent_attention", q, cache, batch, config, k_b, v_b)
    return chosen.run(q, cache, batch, config, k_b, v_b)


def absorbed_is_cheaper(span: SequenceSpan, c: LatentConfig) -> bool:
    """Has the absorbed form fewer multiplications?

    Measured at 47 shapes on one core (20 and 128 heads, float32 and bfloat16), this named the faster form at 42;
    the others lie near the border, two of them lost over a half.
    """
    queries, context = span.count, span.context_len
    weights = (c.nope_dim + c.value_dim) * c.kv_lora_rank
    absorbed = queries * (weights + context * (2 * c.kv_lora_rank + c.rope_dim))
    expanded = context * (weights + queries * (c.nope_dim + c.rope_dim + c.value_dim))
    return absorbed <= expanded


def cpu_tokens_unsupported(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> str | None:
    if reason := own.unsupported(q, cache.latents):
        return reason
    if cache.scale is not None:
        return "latents are kept in 8 bits"
    return None if own.short_sequences(batch, own.max_short_tokens()) else "every sequence brings many tokens"


@kernel("latent_attention", "cpu-tokens", cpu_tokens_unsupported)
def latent_attention_tokens(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """Sequences that bring a few tokens absorbed, token by token, so that a token's result does not depend on
    those that came with it; the others as elsewhere."""
    c, most = config, own.max_short_tokens()
    out = q.new_empty(*q.shape[:2], c.value_dim)
    few = own.short_sequences(batch, most)
    tokens = [t for i in few for t in range(batch.spans[i].start, batch.spans[i].start + batch.spans[i].count)]
    wide = q.new_empty(*q.shape[:2], c.kv_lora_rank + c.rope_dim)
    mixture = q.new_empty(*q.shape[:2], c.kv_lora_rank)
    for t in tokens:
        wide[t, :, : c.kv_lora_rank] = (q[t, :, None, : c.nope_dim] @ k_b)[:, 0]
        wide[t, :, c.kv_lora_rank :] = q[t, :, c.nope_dim :]
    rows = cache.latents[:, None]  # as of one head of keys
    own.attend(mixture, wide, rows, rows[..., : c.kv_lora_rank], None, batch, most, c.scale)
    for t in tokens:
        out[t] = (mixture[t, :, None] @ v_b.transpose(1, 2))[:, 0]
    attend_cheaper_form(out, q, [i for i in range(len(batch.spans)) if i not in few], cache, batch, c, k_b, v_b)
    return out


@kernel("latent_attention", "torch-two-forms")
def latent_attention_two_forms(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    out = q.new_empty(*q.shape[:2], config.value_dim)
    attend_cheaper_form(out, q, list(range(len(batch.spans))), cache, batch, config, k_b, v_b)
    return out


def attend_cheaper_form(
    out: Tensor,
    q: Tensor,
    some: list[int],
    cache: LatentCache,
    batch: Batch,
    c: LatentConfig,
    k_b: Tensor,
    v_b: Tensor,
) -> None:
    """Writes the results of some sequences, of each in the form that is cheaper for it."""
    few = [i for i in some if absorbed_is_cheaper(batch.spans[i], c)]
    if few:
        attend_absorbed(out, q, few, cache, batch, c, k_b, v_b)
    for i in some:
        if i not in few:
            span = batch.spans[i]
            mine = slice(span.start, span.start + span.count)
            out[mine] = attend_expanded(q[mine], cache, batch, i, c, k_b, v_b)


def attend_absorbed(
    out: Tensor,
    q: Tensor,
    few: list[int],
    cache: LatentCache,
    batch: Batch,
    c: LatentConfig,
    k_b: Tensor,
    v_b: Tensor,
) -> None:
    """Writes the results of the sequences `few`; k_b and v_b are read once for all of them."""
    spans = [batch.spans[i] for i in few]
    tokens = torch.cat([torch.arange(s.start, s.start + s.count, device=q.device) for s in spans])
    nope, turned = q[tokens].split((c.nope_dim, c.rope_dim), -1)
    wide = torch.cat(((nope.transpose(0, 1) @ k_b).transpose(0, 1), turned), -1)  # [t, heads, rank + rope_dim]
    mixtures = []
    for i, span, mine in zip(few, spans, wide.split([s.count for s in spans]), strict=True):
        k = read_latents(cache, batch, i, q.dtype)[None]  # [1, n, rank + rope_dim]
        v = k[..., : c.kv_lora_rank]
        mask = attention_mask(batch, span, 0, None)
        most = max(1, MAX_SCORES // (c.heads * span.context_len))
        for part, sees in zip(mine.split(most), mask.split(most), strict=True):
            mixtures.append(masked_attention(part, k, v, sees, c.scale))
    latent = torch.cat(mixtures).transpose(0, 1)  # [heads, t, rank]
    out[tokens] = (latent @ v_b.transpose(1, 2)).transpose(0, 1)


def attend_expanded(
    q: Tensor, cache: LatentCache, batch: Batch, index: int, c: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """Of one sequence, some heads at a time so that their keys stay small. q: [q, heads, nope_dim + rope_dim]"""
    span = batch.spans[index]
    latent, shared = read_latents(cache, batch, index, q.dtype).split((c.kv_lora_rank, c.rope_dim), -1)
    whole = span.count == span.context_len
    mask = None if whole else attention_mask(batch, span, 0, None)
    width = max(q.shape[-1], c.value_dim)  # torch's fused attention wants keys and values of one size
    most = max(1, MAX_EXPANDED_ELEMENTS // (span.context_len * width))
    out = []
    parts = zip(q.transpose(0, 1).split(most), k_b.split(most), v_b.split(most), strict=True)
    for heads, keys, values in parts:
        nope = F.linear(latent, keys.flatten(0, 1)).unflatten(-1, keys.shape[:2])  # [n, heads, nope_dim]
        v = F.linear(latent, values.flatten(0, 1)).unflatten(-1, values.shape[:2])  # [n, heads, value_dim]
        k = torch.cat((nope, shared[:, None].expand(-1, len(keys), -1)), -1)
        some, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (heads, k.transpose(0, 1), v.transpose(0, 1)))
        attended = F.scaled_dot_product_attention(
            some[None], k[None], v[None], mask, is_causal=whole, scale=c.scale
        )[0]
        out.append(attended[..., : c.value_dim])
    return torch.cat(out).transpose(0, 1)


def read_latents(cache: LatentCache, batch: Batch, index: int, dtype: torch.dtype) -> Tensor:
    """[n, rank + rope_dim] of all positions of a sequence, in `dtype` if they are kept in 8 bits."""
    scale = None if cache.scale is None else read_positions(cache.scale, batch, index, 0)
    return dequantize_latents(read_positions(cache.latents, batch, index, 0), scale, cache.latent_widths, dtype)


def dequantize_latents(rows: Tensor, scale: Tensor | None, widths: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """rows: [n, rank + rope_dim]; scale: [n, 2], of the latent and of the key."""
    if scale is None:
        return rows
    parts = zip(rows.split(widths, -1), scale.unbind(-1), strict=True)
    return torch.cat([dequantize_vectors(part, one, dtype) for part, one in parts], -1)


@kernel("latent_attention", "reference")
def latent_attention_reference(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """The formula, written out over the block table."""
    out = q.new_empty(*q.shape[:2], config.value_dim)
    start, context, size = batch.query_start.tolist(), batch.context_len.tolist(), batch.block_size
    for i, length in enumerate(context):
        mine = slice(start[i], start[i + 1])
        slots = (batch.block_table[i][:, None] * size + torch.arange(size, device=q.device)).flatten()[:length]
        rows = dequantize_latents(
            as_bits(cache.latents)[slots].view(cache.latents.dtype),
            None if cache.scale is None else cache.scale[slots],
            cache.latent_widths,
            q.dtype,
        )
        latent, shared = rows.split((config.kv_lora_rank, config.rope_dim), -1)
        k = torch.einsum("kr,hdr->khd", latent, k_b)
        k = torch.cat((k, shared[:, None].expand(-1, config.heads, -1)), -1)
        v = torch.einsum("kr,hdr->khd", latent, v_b)
        score = torch.einsum("qhd,khd->hqk", q[mine], k) * config.scale
        hidden = batch.positions[mine][:, None] < torch.arange(length, device=q.device)
        weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
        out[mine] = torch.einsum("hqk,khd->qhd", weight, v)
    return out

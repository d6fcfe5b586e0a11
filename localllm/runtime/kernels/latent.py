"""Latent attention (MLA): softmax(q k^T * scale) v, with each head's k and v computed from the cached latents.

q: [T, heads, nope_dim + rope_dim]; cache: [slots, rank + rope_dim], the latent c and one rotated key r for all
heads; k_b: [heads, nope_dim, rank]; v_b: [heads, value_dim, rank]. A head's key is (k_b c, r), its value v_b c.
Two forms are mathematically equal (DeepSeek-V2, section 2.1.2 and appendix C):

    expanded   computes the keys and values of all visible positions, then attends as usual: for many queries
    absorbed   (k_b^T q)·c = q·(k_b c): moves k_b to the query and v_b to the result, and attends to the latents
               themselves, like one key-value head: for few queries

Bytes read by a decode step: context * (rank + rope_dim) * itemsize (in 8 bits 4 more per token), k_b and v_b.
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

MAX_EXPANDED_ELEMENTS = 2**25  # in the keys of the heads that are processed at once: 128 MB in float32


def latent_attention(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """Return [T, heads, value_dim]."""
    kernel = choose("latent_attention", q, cache, batch, config, k_b, v_b)
    return kernel.run(q, cache, batch, config, k_b, v_b)


def absorbed_is_cheaper(span: SequenceSpan, c: LatentConfig) -> bool:
    """Return whether the absorbed form needs fewer multiplications.

    Measured at 47 shapes on one core (20 and 128 heads, float32 and bfloat16), this selected the faster form at
    42; the others are close to the boundary, and two of them lost more than half.
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
        return "latents are stored in 8 bits"
    return None if own.short_sequences(batch, own.max_short_tokens()) else "every sequence has many new tokens"


@kernel("latent_attention", "cpu-tokens", cpu_tokens_unsupported)
def latent_attention_tokens(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """Process sequences with a few new tokens absorbed and token by token, and the others with torch.

    The result of such a token does not depend on the other tokens of the step.
    """
    c, max_tokens = config, own.max_short_tokens()
    out = q.new_empty(*q.shape[:2], c.value_dim)
    short_sequences = own.short_sequences(batch, max_tokens)
    tokens = [
        t
        for i in short_sequences
        for t in range(batch.spans[i].start, batch.spans[i].start + batch.spans[i].count)
    ]
    absorbed_q = q.new_empty(*q.shape[:2], c.kv_lora_rank + c.rope_dim)
    mixture = q.new_empty(*q.shape[:2], c.kv_lora_rank)
    for t in tokens:
        absorbed_q[t, :, : c.kv_lora_rank] = (q[t, :, None, : c.nope_dim] @ k_b)[:, 0]
        absorbed_q[t, :, c.kv_lora_rank :] = q[t, :, c.nope_dim :]
    latents = cache.latents[:, None]  # with a dimension for the single key head
    own.attend(
        mixture, absorbed_q, latents, latents[..., : c.kv_lora_rank], (None, None), batch, max_tokens, c.scale
    )
    for t in tokens:
        out[t] = (mixture[t, :, None] @ v_b.transpose(1, 2))[:, 0]
    attend_cheaper_form(
        out, q, [i for i in range(len(batch.spans)) if i not in short_sequences], cache, batch, c, k_b, v_b
    )
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
    indices: list[int],
    cache: LatentCache,
    batch: Batch,
    c: LatentConfig,
    k_b: Tensor,
    v_b: Tensor,
) -> None:
    """Write the results of some sequences to `out`, using the cheaper form for each."""
    absorbed = [i for i in indices if absorbed_is_cheaper(batch.spans[i], c)]
    if absorbed:
        attend_absorbed(out, q, absorbed, cache, batch, c, k_b, v_b)
    for i in indices:
        if i not in absorbed:
            span = batch.spans[i]
            token_slice = slice(span.start, span.start + span.count)
            out[token_slice] = attend_expanded(q[token_slice], cache, batch, i, c, k_b, v_b)


def attend_absorbed(
    out: Tensor,
    q: Tensor,
    indices: list[int],
    cache: LatentCache,
    batch: Batch,
    c: LatentConfig,
    k_b: Tensor,
    v_b: Tensor,
) -> None:
    """Write the results of the given sequences to `out`, reading k_b and v_b once for all of them."""
    spans = [batch.spans[i] for i in indices]
    tokens = torch.cat([torch.arange(s.start, s.start + s.count, device=q.device) for s in spans])
    nope, rotated = q[tokens].split((c.nope_dim, c.rope_dim), -1)
    # [t, heads, rank + rope_dim].
    absorbed_q = torch.cat(((nope.transpose(0, 1) @ k_b).transpose(0, 1), rotated), -1)
    mixtures = []
    for i, span, queries in zip(indices, spans, absorbed_q.split([s.count for s in spans]), strict=True):
        k = read_latents(cache, batch, i, q.dtype)[None]  # [1, n, rank + rope_dim]
        v = k[..., : c.kv_lora_rank]
        mask = attention_mask(batch, span, 0, None)
        max_queries = max(1, MAX_SCORES // (c.heads * span.context_len))
        for query_part, mask_part in zip(queries.split(max_queries), mask.split(max_queries), strict=True):
            mixtures.append(masked_attention(query_part, k, v, mask_part, c.scale))
    latent = torch.cat(mixtures).transpose(0, 1)  # [heads, t, rank]
    out[tokens] = (latent @ v_b.transpose(1, 2)).transpose(0, 1)


def attend_expanded(
    q: Tensor, cache: LatentCache, batch: Batch, index: int, c: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """Return the result of one sequence, computing a few heads at a time to keep their keys small.

    q: [q, heads, nope_dim + rope_dim] -> [q, heads, value_dim]
    """
    span = batch.spans[index]
    latent, shared_key = read_latents(cache, batch, index, q.dtype).split((c.kv_lora_rank, c.rope_dim), -1)
    is_full_causal = span.count == span.context_len
    mask = None if is_full_causal else attention_mask(batch, span, 0, None)
    width = max(q.shape[-1], c.value_dim)  # torch's fused attention needs keys and values of one width
    max_heads = max(1, MAX_EXPANDED_ELEMENTS // (span.context_len * width))
    out = []
    parts = zip(q.transpose(0, 1).split(max_heads), k_b.split(max_heads), v_b.split(max_heads), strict=True)
    for heads, keys, values in parts:
        nope = F.linear(latent, keys.flatten(0, 1)).unflatten(-1, keys.shape[:2])  # [n, heads, nope_dim]
        v = F.linear(latent, values.flatten(0, 1)).unflatten(-1, values.shape[:2])  # [n, heads, value_dim]
        k = torch.cat((nope, shared_key[:, None].expand(-1, len(keys), -1)), -1)
        queries, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (heads, k.transpose(0, 1), v.transpose(0, 1)))
        attended = F.scaled_dot_product_attention(
            queries[None], k[None], v[None], mask, is_causal=is_full_causal, scale=c.scale
        )[0]
        out.append(attended[..., : c.value_dim])
    return torch.cat(out).transpose(0, 1)


def read_latents(cache: LatentCache, batch: Batch, index: int, dtype: torch.dtype) -> Tensor:
    """Return [n, rank + rope_dim] of all positions of a sequence, dequantized to `dtype` if stored in 8 bits."""
    scale = None if cache.scale is None else read_positions(cache.scale, batch, index, 0)
    return dequantize_latents(read_positions(cache.latents, batch, index, 0), scale, cache.latent_widths, dtype)


def dequantize_latents(
    latents: Tensor, scale: Tensor | None, widths: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Dequantize latents. rows: [n, rank + rope_dim]; scale: [n, 2], of the latent and of the key"""
    if scale is None:
        return latents
    parts = zip(latents.split(widths, -1), scale.unbind(-1), strict=True)
    return torch.cat([dequantize_vectors(part, part_scale, dtype) for part, part_scale in parts], -1)


@kernel("latent_attention", "reference")
def latent_attention_reference(
    q: Tensor, cache: LatentCache, batch: Batch, config: LatentConfig, k_b: Tensor, v_b: Tensor
) -> Tensor:
    """Compute the formula literally over the block table."""
    out = q.new_empty(*q.shape[:2], config.value_dim)
    start, context, size = batch.query_start.tolist(), batch.context_len.tolist(), batch.block_size
    for i, length in enumerate(context):
        token_slice = slice(start[i], start[i + 1])
        slots = (batch.block_table[i][:, None] * size + torch.arange(size, device=q.device)).flatten()[:length]
        latents = dequantize_latents(
            as_bits(cache.latents)[slots].view(cache.latents.dtype),
            None if cache.scale is None else cache.scale[slots],
            cache.latent_widths,
            q.dtype,
        )
        latent, shared_key = latents.split((config.kv_lora_rank, config.rope_dim), -1)
        k = torch.einsum("kr,hdr->khd", latent, k_b)
        k = torch.cat((k, shared_key[:, None].expand(-1, config.heads, -1)), -1)
        v = torch.einsum("kr,hdr->khd", latent, v_b)
        score = torch.einsum("qhd,khd->hqk", q[token_slice], k) * config.scale
        hidden = batch.positions[token_slice][:, None] < torch.arange(length, device=q.device)
        weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
        out[token_slice] = torch.einsum("hqk,khd->qhd", weight, v)
    return out

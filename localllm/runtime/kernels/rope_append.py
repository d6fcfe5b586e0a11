"""The step from the product of q, k and v to attention: norms, rotary positions, and appending to the cache.

A token's row of `qkv` holds its heads of q (each followed by its gate, if there are gates), then those of k, then
those of v. A layer that reads another layer's cache has only q, and where values are the unrotated keys, there is
no v.
"""

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, QueryScaling
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.cpu import rope_append as cpu_rope_append
from localllm.runtime.kernels.elementwise import map_in_vectors, rms_norm, rotate
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kv_cache.tensors import KVCache

Angles = tuple[Tensor, Tensor]


def rope_append(
    qkv: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Return q and its gates, [T, heads, head_dim] each, and append keys and values to the cache.

    qkv: [T, rows of the product]; angles: cos and sin, [T, 1, dim / 2] float32; eps: of the norm of values
    """
    arguments = (qkv, cache, batch, config, angles, q_norm, k_norm, eps)
    return choose("rope_append", *arguments).run(*arguments)


def cpu_rope_append_unsupported(
    qkv: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, angles: Angles | None, *_: object
) -> str | None:
    return cpu_rope_append.unsupported(qkv, cache, config, angles)


@kernel("rope_append", "cpu-heads", cpu_rope_append_unsupported)
def rope_append_cpu(
    qkv: Tensor, cache: KVCache, batch: Batch, config: AttentionConfig, angles: Angles, *_: object
) -> tuple[Tensor, None]:
    return cpu_rope_append.rope_append(qkv, cache, batch.slot_mapping, config, angles), None


@kernel("rope_append", "reference")
def rope_append_reference(
    qkv: Tensor,
    cache: KVCache,
    batch: Batch,
    config: AttentionConfig,
    angles: Angles | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Apply one operation after another."""
    c = config
    own_kv_heads = c.kv_heads if c.kv_source is None else 0  # heads whose keys this layer computes
    heads = qkv.unflatten(-1, (-1, c.head_dim))
    gate = None
    if c.output_gate:
        q, gate = heads[:, : 2 * c.heads].unflatten(1, (-1, 2)).unbind(2)
        heads = torch.cat((q, heads[:, 2 * c.heads :]), 1)
    qk, v = heads[:, : c.heads + own_kv_heads], heads[:, c.heads + (0 if c.keys_as_values else own_kv_heads) :]
    if c.qk_norm:
        q, k = qk.split((c.heads, own_kv_heads), 1)
        if c.qk_norm == "whole":
            q, k = q.flatten(1), k.flatten(1)
        normed = torch.cat((q_norm(q) if q_norm else q, k_norm(k) if k_norm else k), 1)
        qk = normed.unflatten(1, (-1, c.head_dim)) if c.qk_norm == "whole" else normed
    if c.rope and angles:
        qk = rotate(qk, *angles, c.rope.interleaved)
    q, k = qk.split((c.heads, own_kv_heads), 1)
    if c.query_growth:
        q = q * query_growth(c.query_growth, batch.positions)[:, None, None].to(q.dtype)
    if own_kv_heads:
        cache.append(k, rms_norm(v, None, eps) if c.value_norm else v, batch.slot_mapping)
    return cache.rotate(q).to(q.dtype), gate


def query_growth(config: QueryScaling, positions: Tensor) -> Tensor:
    """Return the position-dependent factor of queries. positions: [T] -> [T] float32"""
    return 1 + config.beta * map_in_vectors(torch.log, 1 + torch.floor(positions / config.original_context))

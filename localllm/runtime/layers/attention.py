"""Grouped-query attention over the paged cache."""

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, ModelConfig, QueryGrowth
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.cache import KVCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.load import Source


class Attention:
    def __init__(self, config: AttentionConfig, model: ModelConfig, source: Source):
        self.config = c = config
        hidden, queries, keys = model.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
        apart = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        names = {"qkv_proj": queries + 2 * keys} if source.has_matrix("qkv_proj") else apart
        self.qkv = Linear.load(source, names, hidden, c.qkv_bias)
        self.out = Linear.load(source, {"o_proj": hidden}, queries, c.out_bias)
        if c.qk_norm:
            whole = c.qk_norm == "whole"
            self.q_norm = load_norm(source, "q_norm", queries if whole else c.head_dim, model)
            self.k_norm = load_norm(source, "k_norm", keys if whole else c.head_dim, model)
        self.sinks = source.tensor("sinks", c.heads) if c.sinks else None

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """x: [T, hidden] -> [T, hidden]"""
        c = self.config
        qkv = self.qkv(x).unflatten(-1, (-1, c.head_dim))  # [T, heads + 2 * kv_heads, head_dim]
        qk, v = qkv.split((c.heads + c.kv_heads, c.kv_heads), 1)
        if c.qk_norm:
            qk = self.normed(*qk.split((c.heads, c.kv_heads), 1))
        if c.rope:
            qk = kernels.rotate(qk, *batch.angles[c.rope], c.rope.interleaved)
        q, k = qk.split((c.heads, c.kv_heads), 1)
        if c.query_growth:
            q = q * growth(c.query_growth, batch.positions)[:, None, None].to(q.dtype)
        cache.append(k, v, batch.slot)
        return self.out(kernels.attention(q, cache, batch, c, self.sinks).flatten(1))

    def normed(self, q: Tensor, k: Tensor) -> Tensor:
        if self.config.qk_norm == "per_head":
            return torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        return torch.cat((self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))), 1).unflatten(
            -1, (-1, q.shape[-1])
        )


def growth(config: QueryGrowth, positions: Tensor) -> Tensor:
    """positions: [T] -> [T] float32"""
    return 1 + config.beta * torch.log(1 + torch.floor(positions / config.original_context))

"""Grouped-query attention over the paged cache."""

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, ModelConfig, QueryGrowth
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.cache import KVCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.norm import identity, load_norm
from localllm.runtime.load import Source


class Attention:
    def __init__(self, config: AttentionConfig, model: ModelConfig, source: Source):
        self.config = c = config
        self.eps = model.norm_eps
        self.own = c.kv_heads if c.kv_source is None else 0  # heads of keys that are made here
        hidden, queries, keys = model.hidden_size, c.heads * c.head_dim, self.own * c.head_dim
        apart = {
            "q_proj": queries * (2 if c.output_gate else 1),
            "k_proj": keys,
            "v_proj": 0 if c.keys_as_values else keys,
        }
        apart = {name: rows for name, rows in apart.items() if rows}
        names = {"qkv_proj": sum(apart.values())} if source.has_matrix("qkv_proj") else apart
        self.qkv = Linear.load(source, names, hidden, c.qkv_bias)
        self.out = Linear.load(source, {"o_proj": hidden}, queries, c.out_bias)
        if c.qk_norm:
            whole = c.qk_norm == "whole"
            self.q_norm = load_norm(source, "q_norm", queries if whole else c.head_dim, model)
            k_norm = load_norm(source, "k_norm", keys if whole else c.head_dim, model) if self.own else identity
            self.k_norm = k_norm
        self.sinks = source.tensor("sinks", c.heads) if c.sinks else None

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """x: [T, hidden] -> [T, hidden]"""
        c = self.config
        qkv = self.qkv(x).unflatten(-1, (-1, c.head_dim))  # [T, heads of q with gates, of k and of v, head_dim]
        gate = None
        if c.output_gate:  # each head's gate follows its q
            q, gate = qkv[:, : 2 * c.heads].unflatten(1, (-1, 2)).unbind(2)
            qkv = torch.cat((q, qkv[:, 2 * c.heads :]), 1)
        qk, v = qkv[:, : c.heads + self.own], qkv[:, c.heads + (0 if c.keys_as_values else self.own) :]
        if c.qk_norm:
            qk = self.normed(*qk.split((c.heads, self.own), 1))
        if c.rope:
            qk = kernels.rotate(qk, *batch.angles[c.rope], c.rope.interleaved)
        q, k = qk.split((c.heads, self.own), 1)
        if c.query_growth:
            q = q * growth(c.query_growth, batch.positions)[:, None, None].to(q.dtype)
        if self.own:
            cache.append(k, kernels.rms_norm(v, None, self.eps) if c.value_norm else v, batch.slot)
        mixed = kernels.attention(q, cache, batch, c, self.sinks)
        return self.out((mixed if gate is None else mixed * torch.sigmoid(gate)).flatten(1))

    def normed(self, q: Tensor, k: Tensor) -> Tensor:
        if self.config.qk_norm == "per_head":
            return torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        return torch.cat((self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))), 1).unflatten(
            -1, (-1, q.shape[-1])
        )


def growth(config: QueryGrowth, positions: Tensor) -> Tensor:
    """positions: [T] -> [T] float32"""
    return 1 + config.beta * torch.log(1 + torch.floor(positions / config.original_context))

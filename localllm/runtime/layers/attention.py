"""Grouped-query attention over the paged cache."""

from torch import Tensor

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kv_cache.tensors import KVCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.weight_source import WeightSource


class Attention:
    def __init__(self, config: AttentionConfig, model: ModelConfig, source: WeightSource):
        self.config = c = config
        self.eps = model.norm_eps
        own_kv_heads = c.kv_heads if c.kv_source is None else 0  # heads whose keys this layer computes
        hidden, queries, keys = model.hidden_size, c.heads * c.head_dim, own_kv_heads * c.head_dim
        separate = {
            "q_proj": queries * (2 if c.output_gate else 1),
            "k_proj": keys,
            "v_proj": 0 if c.keys_as_values else keys,
        }
        separate = {name: rows for name, rows in separate.items() if rows}
        names = {"qkv_proj": sum(separate.values())} if source.has_matrix("qkv_proj") else separate
        self.qkv = Linear.load(source, names, hidden, c.qkv_bias)
        self.out = Linear.load(source, {"o_proj": hidden}, queries, c.out_bias)
        self.q_norm = self.k_norm = None
        if c.qk_norm:
            norms_all_heads = c.qk_norm == "whole"
            self.q_norm = load_norm(source, "q_norm", queries if norms_all_heads else c.head_dim, model)
            self.k_norm = (
                load_norm(source, "k_norm", keys if norms_all_heads else c.head_dim, model)
                if own_kv_heads
                else None
            )
        self.sinks = source.tensor("sinks", c.heads) if c.sinks else None

    def __call__(
        self, x: Tensor, batch: Batch, cache: KVCache, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Return residual + attention(norm(x)). x: [T, hidden] -> [T, hidden]"""
        c = self.config
        angles = batch.rope_angles[c.rope] if c.rope else None
        q, gate = kernels.rope_append(
            self.qkv(x, norm=norm), cache, batch, c, angles, self.q_norm, self.k_norm, self.eps
        )
        mixed = kernels.attention(q, cache, batch, c, self.sinks)
        return self.out((mixed if gate is None else mixed * kernels.sigmoid(gate)).flatten(1), residual=residual)

"""Grouped-query attention over the paged cache."""

from torch import Tensor

from localllm.arch.config import AttentionConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.cache import KVCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.load import Source


class Attention:
    def __init__(self, config: AttentionConfig, hidden: int, norm_eps: float, source: Source):
        self.config = c = config
        self.norm_eps = norm_eps
        rows = {
            "q_proj": c.heads * c.head_dim,
            "k_proj": c.kv_heads * c.head_dim,
            "v_proj": c.kv_heads * c.head_dim,
        }
        self.qkv = Linear.load(source, rows, hidden, c.qkv_bias)
        self.out = Linear.load(source, {"o_proj": hidden}, c.heads * c.head_dim, c.out_bias)
        self.q_norm = source.tensor("q_norm.weight", c.head_dim) if c.qk_norm else None
        self.k_norm = source.tensor("k_norm.weight", c.head_dim) if c.qk_norm else None

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x: [T, hidden]; angles: cos and sin of the tokens' positions -> [T, hidden]"""
        c = self.config
        qkv = self.qkv(x).unflatten(-1, (-1, c.head_dim))  # [T, heads + 2 * kv_heads, head_dim]
        qk, v = qkv.split((c.heads + c.kv_heads, c.kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            qk[:, : c.heads] = kernels.rms_norm(qk[:, : c.heads], self.q_norm, self.norm_eps)
            qk[:, c.heads :] = kernels.rms_norm(qk[:, c.heads :], self.k_norm, self.norm_eps)
        q, k = kernels.rotate(qk, *angles).split((c.heads, c.kv_heads), 1)
        cache.append(k, v, batch.slot)
        return self.out(kernels.attention(q, cache, batch, c).flatten(1))

"""A gated delta net layer (Qwen3-Next, Qwen3.5): recurrent, with a state of constant size."""

from functools import partial

import torch
from torch import Tensor

from localllm.arch.config import DeltaNetConfig, ModelConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.norm import FollowingNorm, Norm
from localllm.runtime.kv_cache.tensors import RecurrentCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.weight_source import WeightSource


class DeltaNet:
    def __init__(self, config: DeltaNetConfig, model: ModelConfig, source: WeightSource):
        self.config = c = config
        self.eps = model.norm_eps
        hidden, values = model.hidden_size, c.value_heads * c.value_dim
        shares = c.value_heads // c.key_heads
        if source.has_matrix("in_proj_qkvz"):
            order = partial(
                rows_by_part, c.key_heads, [c.key_dim, c.key_dim, shares * c.value_dim, shares * c.value_dim]
            )
            self.qkvz = Linear.load(source, {"in_proj_qkvz": c.channels + values}, hidden, False, order)
        else:
            self.qkvz = Linear.load(source, {"in_proj_qkv": c.channels, "in_proj_z": values}, hidden, False)
        if source.has_matrix("in_proj_ba"):
            order = partial(rows_by_part, c.key_heads, [shares, shares])
            self.ba = Linear.load(source, {"in_proj_ba": 2 * c.value_heads}, hidden, False, order)
        else:
            self.ba = Linear.load(source, {"in_proj_b": c.value_heads, "in_proj_a": c.value_heads}, hidden, False)
        self.conv_weight = source.float32_tensor("conv1d.weight", c.channels, 1, c.kernel_size)[
            :, 0
        ].T.contiguous()
        stores_rate = source.weights.has("A")  # GGUF
        self.decay_rate = (
            source.float32_tensor("A", c.value_heads)
            if stores_rate
            else -source.float32_tensor("A_log", c.value_heads).exp()
        )
        self.dt_bias = source.float32_tensor("dt_bias", c.value_heads)
        self.norm = source.float32_tensor("norm.weight", c.value_dim)
        self.out = Linear.load(source, {"out_proj": hidden}, values, bias=False, by_columns=True)

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: RecurrentCache,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + delta_net(norm(x)). x: [T, hidden] -> [T, hidden]"""
        c = self.config
        x = norm(x) if norm else x  # once for both products
        qkv, z = self.qkvz(x).split((c.channels, c.value_heads * c.value_dim), -1)
        b, a = self.ba(x).float().chunk(2, -1)  # [T, value_heads]
        qkv = kernels.causal_conv(qkv, self.conv_weight, cache, batch, silu=True)
        qk, v = qkv.split((2 * c.key_heads * c.key_dim, c.value_heads * c.value_dim), -1)
        q, k = kernels.l2_normalize(qk.unflatten(-1, (-1, c.key_dim))).chunk(2, 1)
        v, z = (tensor.unflatten(-1, (-1, c.value_dim)) for tensor in (v, z))
        decay, beta = self.decay_rate * kernels.softplus(a + self.dt_bias), kernels.sigmoid(b)
        if c.tiled:
            v, decay, beta = (regroup_heads(tensor, c.key_heads) for tensor in (v, decay, beta))
        mixed = kernels.delta_net(q, k, v, decay, beta, cache, batch)
        if c.tiled:
            mixed = regroup_heads(mixed, c.value_heads // c.key_heads)
        mixed = kernels.gated_rms_norm(mixed, z, self.norm, self.eps)
        return self.out(mixed.flatten(1), residual=residual, following=following)


def regroup_heads(x: Tensor, heads: int) -> Tensor:
    """Reorder [T, n * heads, ...], heads varying fastest, so that n varies fastest."""
    return x.unflatten(1, (-1, heads)).transpose(1, 2).flatten(1, 2)


def rows_by_part(heads: int, sizes: list[int]) -> Tensor:
    """Return the row order that groups parts (q, k, v, z) of a stack in which each head has all parts in
    sequence.
    """
    parts = torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, 1)
    return torch.cat([rows.flatten() for rows in parts])

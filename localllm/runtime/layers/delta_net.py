"""A gated delta net layer (Qwen3-Next, Qwen3.5): recurrent, with a state whose size does not grow."""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import DeltaNetConfig, ModelConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.cache import RecurrentCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.load import Source


class DeltaNet:
    def __init__(self, config: DeltaNetConfig, model: ModelConfig, source: Source):
        self.config = c = config
        self.eps = model.norm_eps
        hidden, values = model.hidden_size, c.value_heads * c.value_dim
        if source.has_matrix("in_proj_qkvz"):
            qkvz, ba = {"in_proj_qkvz": c.channels + values}, {"in_proj_ba": 2 * c.value_heads}
            shares = c.value_heads // c.key_heads
            order = by_kind(c.key_heads, [c.key_dim, c.key_dim, shares * c.value_dim, shares * c.value_dim])
            order_ba = by_kind(c.key_heads, [shares, shares])
        else:
            qkvz, ba = (
                {"in_proj_qkv": c.channels, "in_proj_z": values},
                {"in_proj_b": c.value_heads, "in_proj_a": c.value_heads},
            )
            order = order_ba = None
        self.qkvz = Linear.load(source, qkvz, hidden, bias=False, order=order)
        self.ba = Linear.load(source, ba, hidden, bias=False, order=order_ba)
        self.taps = source.exact("conv1d.weight", c.channels, 1, c.kernel)[:, 0].T.contiguous()
        self.rate = -source.exact("A_log", c.value_heads).exp()
        self.dt_bias = source.exact("dt_bias", c.value_heads)
        self.norm = source.exact("norm.weight", c.value_dim)
        self.out = Linear.load(source, {"out_proj": hidden}, values, bias=False)

    def __call__(self, x: Tensor, batch: Batch, cache: RecurrentCache) -> Tensor:
        """x: [T, hidden] -> [T, hidden]"""
        c = self.config
        qkv, z = self.qkvz(x).split((c.channels, c.value_heads * c.value_dim), -1)
        b, a = self.ba(x).float().chunk(2, -1)  # [T, value_heads]
        qkv = F.silu(kernels.causal_conv(qkv, self.taps, cache, batch))
        qk, v = qkv.split((2 * c.key_heads * c.key_dim, c.value_heads * c.value_dim), -1)
        q, k = kernels.unit(qk.unflatten(-1, (-1, c.key_dim))).chunk(2, 1)
        v, z = (each.unflatten(-1, (-1, c.value_dim)) for each in (v, z))
        decay = self.rate * F.softplus(a + self.dt_bias)
        mixed = kernels.delta_net(q, k, v, decay, torch.sigmoid(b), cache, batch)
        return self.out(kernels.gated_rms_norm(mixed, z, self.norm, self.eps).flatten(1))


def by_kind(heads: int, sizes: list[int]) -> Tensor:
    """The order of rows that brings those of one kind together, of a stack where each head has all kinds (q, k, v,
    z) one after another."""
    kinds = torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, 1)
    return torch.cat([rows.flatten() for rows in kinds])

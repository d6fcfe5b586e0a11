"""A gated short convolution layer (LFM2): recurrent, and remembers no more than its last tokens."""

from torch import Tensor

from localllm.arch.config import ModelConfig, ShortConvConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kv_cache.tensors import RecurrentCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.weight_source import WeightSource


class ShortConv:
    def __init__(self, config: ShortConvConfig, model: ModelConfig, source: WeightSource):
        hidden, bias = model.hidden_size, config.bias
        self.in_proj = Linear.load(source, {"in_proj": 3 * hidden}, hidden, bias)
        self.conv_weight = source.float32_tensor("conv.weight", hidden, 1, config.kernel_size)[:, 0].T.contiguous()
        self.bias = source.tensor("conv.bias", hidden) if bias else None
        self.out = Linear.load(source, {"out_proj": hidden}, hidden, bias)

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: RecurrentCache,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x: [T, hidden] -> [T, hidden], of norm(x) and added to the residual"""
        before, after, x = self.in_proj(x, norm=norm).chunk(3, -1)
        mixed = kernels.causal_conv(before * x, self.conv_weight, cache, batch)
        return self.out(after * (mixed if self.bias is None else mixed + self.bias), residual=residual)

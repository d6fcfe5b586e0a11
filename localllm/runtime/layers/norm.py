"""Norms. Their weights stay in float32, whatever the model's dtype: some are stored as an offset from one."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.weight_source import WeightSource


def load_norm(source: WeightSource, name: str, size: int, model: ModelConfig, eps: float | None = None) -> Norm:
    norm_type = "layer" if model.norm == "layer" else "rms"
    weight, eps = source.norm_weight(f"{name}.weight", size), eps or model.norm_eps
    if model.encoder and model.encoder.norm_bias:
        return BiasedLayerNorm(weight, eps, norm_type, bias=source.float32_tensor(f"{name}.bias", size))
    return Norm(weight, eps, norm_type)


@dataclass(frozen=True, eq=False, kw_only=True)
class BiasedLayerNorm(Norm):
    """Layer normalization with a bias, as in encoders; never fused into a product."""

    bias: Tensor  # [size] float32

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (x.shape[-1],), self.weight, self.bias, self.eps).to(x.dtype)


def identity(x: Tensor) -> Tensor:
    return x

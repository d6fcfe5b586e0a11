"""Norms. Their few weights stay in float32, whatever the model's dtype: some are stored as an offset from one."""

from collections.abc import Callable

from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.runtime import kernels
from localllm.runtime.load import Source

Norm = Callable[[Tensor], Tensor]


def load_norm(source: Source, name: str, size: int, model: ModelConfig, eps: float | None = None) -> Norm:
    weight = source.norm(f"{name}.weight", size)
    operation = kernels.layer_norm if model.norm == "layer" else kernels.rms_norm
    return lambda x: operation(x, weight, eps or model.norm_eps)


def identity(x: Tensor) -> Tensor:
    return x

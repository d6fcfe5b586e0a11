"""Norms. Their few weights stay in float32, whatever the model's dtype: some are stored as an offset from one."""

from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.load import Source


def load_norm(source: Source, name: str, size: int, model: ModelConfig, eps: float | None = None) -> Norm:
    kind = "layer" if model.norm == "layer" else "rms"
    return Norm(source.norm(f"{name}.weight", size), eps or model.norm_eps, kind)


def identity(x: Tensor) -> Tensor:
    return x

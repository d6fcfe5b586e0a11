"""Where a model can be run so that what it computes of a token depends on the tokens before it alone: not on what
stands beside them in a step, how a prompt is cut, or what was found in the cache. docs/determinism.md has all that
is promised."""

import torch

from localllm.arch.config import LatentConfig, ModelConfig
from localllm.errors import UsageError
from localllm.quant.vectors import DTYPE_MAX
from localllm.runtime.kernels.cpu.compile import cpu_supported


def check_deterministic(config: ModelConfig, device: torch.device, kv_dtype: torch.dtype) -> None:
    """Raises UsageError where that is not proven."""
    if reason := why_not_deterministic(config, device, kv_dtype):
        raise UsageError(*reason)


def why_not_deterministic(
    config: ModelConfig, device: torch.device, kv_dtype: torch.dtype
) -> tuple[str, str] | None:
    """What keeps a model from it, and what to do about that; None where nothing does."""
    if device.type != "cpu":
        said = "--deterministic holds on a CPU alone: on a GPU sums depend on how a prompt is cut"
        return said, "add --device cpu"
    if not cpu_supported():
        return (
            "this processor lacks the instructions of the kernels that --deterministic is made of",
            "leave it out",
        )
    if kv_dtype in DTYPE_MAX and any(isinstance(layer.mixer, LatentConfig) for layer in config.layers):
        return "--deterministic does not hold for latents in 8 bits", "leave out --kv-dtype"
    return None

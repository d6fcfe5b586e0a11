"""residual + scale * norm(x): what stands behind a part of a layer that is normed once more (Gemma, OLMo 2)."""

from torch import Tensor

from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import dispatch, kernel


def add_norm(residual: Tensor, x: Tensor, norm: Norm, scale: float = 1.0) -> Tensor:
    """residual, x: [T, hidden] -> their shape"""
    return dispatch("add_normed", residual, x, norm, scale)


@kernel("add_normed", "reference")
def add_norm_reference(residual: Tensor, x: Tensor, norm: Norm, scale: float) -> Tensor:
    normed = norm(x)
    return residual + (normed if scale == 1.0 else normed * scale)

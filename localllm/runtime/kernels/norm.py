"""residual + scale * norm(x): what stands behind a part of a layer that is normed once more (Gemma, OLMo 2)."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from localllm.runtime.kernels.elementwise import layer_norm, rms_norm
from localllm.runtime.kernels.registry import dispatch, kernel


# A norm with its weight, as a layer holds it: what stands before a product can be done inside it.
@dataclass(frozen=True, eq=False)
class Norm:
    weight: Tensor | None  # [size] float32; None: one
    eps: float
    norm_type: Literal["rms", "layer"] = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension -> the shape of x, in its dtype"""
        if self.norm_type == "rms" or self.weight is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.eps)


def add_norm(residual: Tensor, x: Tensor, norm: Norm, scale: float = 1.0) -> Tensor:
    """residual, x: [T, hidden] -> their shape"""
    return dispatch("add_normed", residual, x, norm, scale)


@kernel("add_normed", "reference")
def add_norm_reference(residual: Tensor, x: Tensor, norm: Norm, scale: float) -> Tensor:
    normed = norm(x)
    return residual + (normed if scale == 1.0 else normed * scale)

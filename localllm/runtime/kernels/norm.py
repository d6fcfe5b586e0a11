"""Norms, and residual + scale * norm(x), for models that normalize a layer's output once more (Gemma, OLMo 2).

The product that computes x can prepare the norm of x for the product that follows, see gpu/small_m.py.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from localllm.runtime.kernels.elementwise import layer_norm, rms_norm
from localllm.runtime.kernels.registry import dispatch, kernel


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm and its weight, passed on so that it can be fused into the product that follows."""

    weight: Tensor | None  # [size] float32; None: 1
    eps: float
    norm_type: Literal["rms", "layer"] = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension -> the shape and dtype of x"""
        if self.norm_type == "rms" or self.weight is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.eps)


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedNorm(Norm):
    """The norm of x, half computed by the product that x comes from. It normalizes other tensors as usual."""

    x: Tensor  # [T, size]
    scaled: Tensor  # x * weight, in the dtype of x
    squares: Tensor  # [T, parts] float32: sums of squares of parts of each row


@dataclass(eq=False)
class FollowingNorm:
    """The norm of a product's result, of which the product may set `scaled` and `squares` (PreparedNorm)."""

    norm: Norm
    scaled: Tensor | None = None
    squares: Tensor | None = None

    def of(self, x: Tensor) -> Norm:
        """Return the norm for the product's result x."""
        if self.scaled is None or self.squares is None:
            return self.norm
        return PreparedNorm(self.norm.weight, self.norm.eps, x=x, scaled=self.scaled, squares=self.squares)


def add_norm(residual: Tensor, x: Tensor, norm: Norm, scale: float = 1.0) -> Tensor:
    """Return residual + scale * norm(x). residual, x: [T, hidden] -> [T, hidden]"""
    return dispatch("add_normed", residual, x, norm, scale)


@kernel("add_normed", "reference")
def add_norm_reference(residual: Tensor, x: Tensor, norm: Norm, scale: float) -> Tensor:
    normed = norm(x)
    return residual + (normed if scale == 1.0 else normed * scale)

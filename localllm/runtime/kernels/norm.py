"""A norm with its weight, as a layer holds it: what stands before a product can be done inside it."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from localllm.runtime.kernels.elementwise import layer_norm, rms_norm


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

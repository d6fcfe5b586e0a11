"""A matrix with an optional bias."""

from torch import Tensor

from localllm.quant.tensor import QuantizedTensor
from localllm.runtime import kernels
from localllm.runtime.load import Source


class Linear:
    def __init__(self, weight: Tensor | QuantizedTensor, bias: Tensor | None = None):
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]

    @classmethod
    def load(cls, source: Source, names: dict[str, int], columns: int, bias: bool) -> "Linear":
        """One matrix of the named ones (name -> rows), stacked by rows."""
        return cls(source.matrix(names, columns), source.vectors(names, "bias") if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

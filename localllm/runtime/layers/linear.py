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
    def load(
        cls, source: Source, names: dict[str, int], columns: int, bias: bool, order: Tensor | None = None
    ) -> "Linear":
        """One matrix of the named ones (name -> rows), stacked by rows; `order`: as in `Source.matrix`."""
        weight = source.matrix(names, columns, order)
        if not bias:
            return cls(weight)
        stacked = source.vectors(names, "bias")
        return cls(weight, stacked if order is None else stacked[order.to(stacked.device)])

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

"""A matrix with an optional bias."""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.quant.tensor import QuantizedTensor
from localllm.runtime import kernels
from localllm.runtime.load import Source


class Linear:
    """`weights`: [out, in] each, one below the other; usually they are stacked in one."""

    def __init__(
        self,
        *weights: Tensor | QuantizedTensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        between: Callable[[], None] = lambda: None,
    ):
        """dtype: of x; between: called each time that some of the weights has been read."""
        self.weights = kernels.prepared(*weights, dtype=dtype, between=between)
        self.bias = bias  # [out]

    @classmethod
    def load(
        cls,
        source: Source,
        names: dict[str, int],
        columns: int,
        bias: bool,
        order: Callable[[], Tensor] | None = None,
    ) -> "Linear":
        """One matrix of the named ones (name -> rows), stacked by rows. `order`: as in `Source.matrices`."""
        weights = source.matrices(names, columns, order)
        vector = source.vectors(names, "bias") if bias else None
        return cls(*weights, bias=vector, dtype=source.dtype, between=source.weights.let_go)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.weights) == 1:
            return kernels.linear(x, self.weights[0], self.bias)
        y = torch.cat([kernels.linear(x, weight) for weight in self.weights], -1)
        return y if self.bias is None else y + self.bias

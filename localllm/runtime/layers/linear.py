"""A matrix with an optional bias."""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime import kernels
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.weight_source import WeightSource


class Linear:
    """A product with weights [out, in] and an optional bias.

    Several weights are stacked by rows; usually it is one.
    """

    def __init__(
        self,
        *weights: Tensor | QuantizedTensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        on_read: Callable[[], None] = lambda: None,
        activation_bits: int | None = None,
    ):
        """dtype: of x; on_read: called whenever some of the weights have been read; activation_bits: see
        `QuantizedTensor`."""
        self.weights = kernels.prepare_weights(
            *weights, dtype=dtype, on_read=on_read, activation_bits=activation_bits
        )
        self.bias = bias  # [out]

    @classmethod
    def load(
        cls,
        source: WeightSource,
        names: dict[str, int],
        columns: int,
        bias: bool,
        order: Callable[[], Tensor] | None = None,
    ) -> "Linear":
        """Load the matrices (name -> rows) stacked by rows. order: see `WeightSource.matrices`."""
        weights = source.matrices(names, columns, order)
        vector = source.concatenated_vectors(names, "bias") if bias else None
        with source.phases("repack"):
            return cls(
                *weights,
                bias=vector,
                dtype=source.dtype,
                on_read=source.weights.release,
                activation_bits=source.activation_bits,
            )

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + gated(W norm(x) + bias), leaving out what is None. x: [T, in]. See kernels/fused.py"""
        return kernels.fused_linear(x, self.weights, self.bias, norm, activation, residual)

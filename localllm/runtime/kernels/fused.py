"""residual + gated(W norm(x) + bias): a product fused with the operations around it.

A GPU then reads and writes activations once. Any part is optional.

x: [T, in]; W: [out, in] in one or more matrices, stacked by rows, each dense or quantized; with an activation, the
first half of W's rows are gates, the second half is multiplied by them.
"""

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.elementwise import gated_activation
from localllm.runtime.kernels.linear import linear
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import dispatch, kernel

Matrices = tuple[Tensor | QuantizedTensor, ...]


def fused_linear(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return [T, out], or [T, out / 2] with an activation. bias: [out]; residual: the shape of the result"""
    return dispatch("fused_linear", x, weights, bias, norm, activation, residual)


@kernel("fused_linear", "reference")
def fused_linear_reference(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> Tensor:
    """Apply one operation after another."""
    if norm:
        x = norm(x)
    if len(weights) == 1:
        y = linear(x, weights[0], bias)
    else:
        y = torch.cat([linear(x, weight) for weight in weights], -1)
        y = y if bias is None else y + bias
    if activation:
        y = gated_activation(y, activation)
    return y if residual is None else residual + y

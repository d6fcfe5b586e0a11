"""residual + gated(W norm(x) + bias): a product fused with the operations around it.

A GPU then reads and writes activations once. Any part is optional.

x: [T, in]; W: [out, in] in one or more matrices, stacked by rows, each dense or quantized; with an activation, the
first half of W's rows are gates, the second half is multiplied by them.
"""

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.packing import INTERLEAVED_BITS, TILE_ROWS
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor
from localllm.runtime.kernels.cpu import elementwise, quantized_matmul
from localllm.runtime.kernels.elementwise import gated_activation
from localllm.runtime.kernels.linear import linear
from localllm.runtime.kernels.norm import FollowingNorm, Norm
from localllm.runtime.kernels.registry import KERNELS, dispatch, kernel

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


def residual_linear(
    x: Tensor, weights: Matrices, bias: Tensor | None, residual: Tensor | None, following: FollowingNorm
) -> Tensor:
    """Return residual + W x + bias, [T, out], and prepare the norm that follows if the kernel can."""
    return dispatch("residual_linear", x, weights, bias, residual, following)


def prepares_norms() -> bool:
    """Return whether there is a kernel of `residual_linear` that prepares norms."""
    return len(KERNELS["residual_linear"]) > 1


def cpu_row_unsupported(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> str | None:
    if x.dim() != 2 or x.shape[0] != 1:  # `len` of a tensor takes ten times as long
        return f"x is {list(x.shape)}"
    if not x.is_cpu or x.dtype not in quantized_matmul.PLANES_BY_DTYPE:
        return f"x is {x.dtype} on {x.device}"
    for weight in weights:
        if isinstance(weight, Tensor) or weight.format not in INTERLEAVED_BITS:
            return "a weight is not interleaved"
        if weight.shape[0] % TILE_ROWS and len(weights) > 1:
            return f"a weight has {weight.shape[0]} rows"
    return None


@kernel("fused_linear", "cpu-row", cpu_row_unsupported)
def fused_linear_cpu_row(
    x: Tensor,
    weights: tuple[QuantizedTensor, ...],
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> Tensor:
    """Compute norm, product and residual in one call; its bits are those of the reference."""
    last, columns = weights[-1], x.shape[1]
    norm_weight, eps = None, 0.0
    if norm:
        reorders = COLUMN_ORDER in last.parts or last.parts["scale"].shape[1] * (last.group or 0) != columns
        plain = type(norm) is Norm and norm.norm_type == "rms" and norm.weight is not None
        if plain and not reorders and elementwise.supports_rms_norm(x, norm.weight):
            norm_weight, eps = norm.weight, norm.eps
        else:
            x = norm(x)
    added = residual if bias is None and activation is None and last.shape[0] % TILE_ROWS == 0 else None
    if added is not None and (added.dtype != x.dtype or not added.is_contiguous()):
        added = None
    y = quantized_matmul.multiply_row(x, weights, norm_weight, eps, added)
    if bias is not None:
        y = y + bias
    if activation:
        y = gated_activation(y, activation)
    return y if residual is None or added is not None else residual + y


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


@kernel("residual_linear", "reference")
def residual_linear_reference(
    x: Tensor, weights: Matrices, bias: Tensor | None, residual: Tensor | None, following: FollowingNorm
) -> Tensor:
    """Leave the norm to the next product."""
    return fused_linear(x, weights, bias, residual=residual)

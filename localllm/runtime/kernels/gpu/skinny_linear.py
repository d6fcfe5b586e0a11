"""Which products go to the kernels for few rows: decode, and the verification of drafts.

A norm before the product is a kernel of its own: done inside, every program would square, scale and round the
part of x that it reads, 16 columns of it for 64 rows of W, about 0.8 instructions a weight beside the 2.3 of
INT4 (arithmetic), while one of its own reads and writes x once, and is there already when its predecessor ends.
"""

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.packing import PLANES
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.fused import Weights
from localllm.runtime.kernels.gpu import skinny_plain, skinny_planes
from localllm.runtime.kernels.gpu.launch import needs_gpu
from localllm.runtime.kernels.gpu.skinny import MOST_ROWS
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def few_rows(x: Tensor, weight: Tensor | QuantizedTensor, *_: object) -> str | None:
    if reason := needs_gpu(x):
        return reason
    rows = x.shape[:-1].numel()
    if not 1 <= rows <= MOST_ROWS:
        return f"{rows} rows, not 1 to {MOST_ROWS}"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}"
    if isinstance(weight, QuantizedTensor):
        return None if weight.format in PLANES else f"the weight is {weight.format}"
    if weight.dtype != x.dtype:
        return f"the weight is {weight.dtype}, x {x.dtype}"
    return None if weight.dim() == 2 and weight.is_contiguous() else "the weight is no dense matrix"


def product(
    x: Tensor,
    weight: Tensor | QuantizedTensor,
    bias: Tensor | None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `fused_linear`, without a norm; x with any dimensions before the last."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, QuantizedTensor):
        y = skinny_planes.product(rows, weight, bias, activation, residual)
    else:
        y = skinny_plain.product(rows, weight, bias, activation, residual)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@kernel("linear", "triton-skinny-planes", few_rows, first=True)
def linear_planes(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return product(x, weight, bias)


@kernel("plain_linear", "triton-skinny", few_rows, first=True)
def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, weight, bias)


def one_matrix(
    x: Tensor,
    weights: Weights,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> str | None:
    if len(weights) != 1:
        return f"{len(weights)} matrices"
    return few_rows(x, weights[0])


@kernel("fused_linear", "triton-skinny", one_matrix, first=True)
def fused_linear(
    x: Tensor,
    weights: Weights,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> Tensor:
    [weight] = weights
    return product(norm(x) if norm else x, weight, bias, activation, residual)

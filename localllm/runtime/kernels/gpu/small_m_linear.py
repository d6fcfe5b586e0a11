"""Selects the products for the kernels for few rows: decoding, and verification of drafts.

A norm before the product is a separate kernel: if fused, every program would square, scale and round the part of x
that it reads, 16 columns for 64 rows of W, about 0.8 instructions per weight in addition to the 2.3 of INT4
(estimated), while a separate one reads and writes x once, and its result is ready when the previous kernel ends.
"""

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.packing import PLANES_PER_WORD
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.fused import Matrices
from localllm.runtime.kernels.gpu import small_m_dense, small_m_packed
from localllm.runtime.kernels.gpu.launch import gpu_unsupported
from localllm.runtime.kernels.gpu.small_m import MAX_ROWS
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def small_m_unsupported(x: Tensor, weight: Tensor | QuantizedTensor, *_: object) -> str | None:
    if reason := gpu_unsupported(x):
        return reason
    rows = x.shape[:-1].numel()
    if not 1 <= rows <= MAX_ROWS:
        return f"{rows} rows, not 1 to {MAX_ROWS}"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}"
    if isinstance(weight, QuantizedTensor):
        return None if weight.format in PLANES_PER_WORD else f"the weight is {weight.format}"
    if weight.dtype != x.dtype:
        return f"the weight is {weight.dtype}, x {x.dtype}"
    return None if weight.dim() == 2 and weight.is_contiguous() else "the weight is not a contiguous matrix"


def small_m_matmul(
    x: Tensor,
    weight: Tensor | QuantizedTensor,
    bias: Tensor | None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Like `fused_linear`, without a norm; x with any dimensions before the last."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, QuantizedTensor):
        y = small_m_packed.packed_matmul(rows, weight, bias, activation, residual)
    else:
        y = small_m_dense.dense_matmul(rows, weight, bias, activation, residual)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@kernel("linear", "triton-skinny-planes", small_m_unsupported, first=True)
def linear_small_m(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return small_m_matmul(x, weight, bias)


@kernel("plain_linear", "triton-skinny", small_m_unsupported, first=True)
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return small_m_matmul(x, weight, bias)


def fused_small_m_unsupported(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> str | None:
    if len(weights) != 1:
        return f"{len(weights)} matrices"
    return small_m_unsupported(x, weights[0])


@kernel("fused_linear", "triton-skinny", fused_small_m_unsupported, first=True)
def fused_linear(
    x: Tensor,
    weights: Matrices,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> Tensor:
    [weight] = weights
    return small_m_matmul(norm(x) if norm else x, weight, bias, activation, residual)

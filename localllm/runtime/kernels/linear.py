"""y = x W^T + bias, where W is plain or quantized.

Decode reads every weight once a token, so the time of this operation is bytes(W) / bandwidth. On the CPU the
INT8 kernel of torch converts while it reads, but only for bfloat16 x: with float32 x it is 21 times slower than
its bfloat16 path (4096 x 4096, one row), so that case takes the reference.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quant.formats import int8
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.registry import choose, kernel

ROWS_WORTH_DEQUANTIZING = 64


def linear(x: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """x: [..., in]; weight: [out, in]; bias: [out] -> [..., out]"""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return choose("linear", x, weight, bias).run(x, weight, bias)


def few_bfloat16_rows_on_cpu(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if weight.format != int8.FORMAT:
        return f"format {weight.format}"
    if x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return f"{x.dtype} on {x.device.type}, not bfloat16 on cpu"
    rows = x.numel() // x.shape[-1]
    return f"{rows} rows: dequantizing first is faster" if rows >= ROWS_WORTH_DEQUANTIZING else None


@kernel("linear", "torch-int8-cpu", few_bfloat16_rows_on_cpu)
def linear_int8_cpu(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    q, scale = weight.parts["q"], weight.parts["scale"].to(x.dtype)
    y = torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), q, scale).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


@kernel("linear", "reference")
def linear_reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, int8.dequantize(weight, x.dtype), bias)

"""W8A8: INT8 weights with a scale per row, multiplied with activations in INT8 with a scale per token.

Parts: q [out, in] int8, scale [out, 1]. y[t, o] = x_scale[t] * scale[o] * sum_i x_q[t, i] * q[o, i]
"""

import torch
from torch import Tensor

from localllm.quant.formats.groups import apply_scales
from localllm.quant.formats.int8 import INT8_MAX
from localllm.quant.packing import W8A8
from localllm.quant.tensor import QuantizedTensor

W8A8_FORMAT = W8A8


def dequantize_w8a8(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weights alone, [out, in] in `dtype`."""
    return apply_scales(weight.parts["q"], weight, 0, dtype)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [..., in] to integers of -127 to 127 in float32, with float32 scales [..., 1].

    A scale maps a token's largest magnitude to 127.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round(), scale

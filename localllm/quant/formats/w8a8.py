"""W8A8: INT8 weights with a scale a row, multiplied with activations in INT8 with a scale a token.

Parts: q [out, in] int8, scale [out, 1]. y[t, o] = x_scale[t] * scale[o] * sum_i x_q[t, i] * q[o, i]
"""

import torch
from torch import Tensor

from localllm.quant.formats.groups import scaled
from localllm.quant.formats.int8 import LARGEST
from localllm.quant.packing import W8A8
from localllm.quant.tensor import QuantizedTensor

FORMAT = W8A8


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The weights alone, [out, in] in `dtype`."""
    return scaled(weight.parts["q"], weight, 0, dtype)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., in] -> whole numbers of -127 to 127 in float32 [..., in], and float32 scales [..., 1] that map each
    token's largest magnitude to 127."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round(), scale

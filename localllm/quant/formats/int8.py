"""INT8, symmetric, one scale an output channel: w[o, i] = q[o, i] * scale[o].

Parts: q [out, in] int8, scale [out] in the model's dtype. 1 byte an element.
"""

import torch
from torch import Tensor

from localllm.quant.packing import INT8
from localllm.quant.tensor import QuantizedTensor

FORMAT = INT8


def quantize(weight: Tensor, scale_dtype: torch.dtype) -> QuantizedTensor:
    """Round to nearest with the scale that maps the largest magnitude of a row to 127. weight: [out, in]"""
    exact = weight.float()
    scale = (exact.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).to(scale_dtype)
    q = (exact / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return QuantizedTensor(FORMAT, (weight.shape[0], weight.shape[1]), {"q": q, "scale": scale})


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`."""
    return weight.parts["q"].to(dtype) * weight.parts["scale"].to(dtype)[:, None]

"""From any packed format to numbers."""

import torch
from torch import Tensor

from localllm.quant.formats import float_planes, fp8, gguf, int4, int8, lanes, mxfp4, planes, w8a8
from localllm.quant.packing import FP8_PLANES, LANES_BITS, MXFP4_PLANES, PLANES
from localllm.quant.tensor import QuantizedTensor

FORMATS = {
    int8.FORMAT: int8.dequantize,
    int4.FORMAT: int4.dequantize,
    w8a8.FORMAT: w8a8.dequantize,
    fp8.FORMAT: fp8.dequantize,
    **dict.fromkeys(LANES_BITS, lanes.dequantize),
    **dict.fromkeys(PLANES, planes.dequantize),
    **dict.fromkeys((MXFP4_PLANES, FP8_PLANES), float_planes.dequantize),
    mxfp4.FORMAT: mxfp4.dequantize,
    **dict.fromkeys(gguf.FORMATS, gguf.dequantize),
}


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`."""
    return FORMATS[weight.format](weight, dtype)

"""From any packed format to numbers."""

import torch
from torch import Tensor

from localllm.quant.formats import gguf, int4, int8, mxfp4
from localllm.quant.tensor import QuantizedTensor

FORMATS = {
    int8.FORMAT: int8.dequantize,
    int4.FORMAT: int4.dequantize,
    mxfp4.FORMAT: mxfp4.dequantize,
    **dict.fromkeys(gguf.FORMATS, gguf.dequantize),
}


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`."""
    return FORMATS[weight.format](weight, dtype)

"""Dequantizes any packed format."""

import torch
from torch import Tensor

from localllm.quant.formats import fp8, gguf, int4, int8, lanes, mxfp4, planes, w8a8
from localllm.quant.packing import FP8_GPU_PACKED, INTERLEAVED_BITS, MXFP4_GPU_PACKED, PLANES_PER_WORD
from localllm.quant.tensor import QuantizedTensor

DEQUANTIZERS = {
    int8.INT8_FORMAT: int8.dequantize_int8,
    int4.INT4_FORMAT: int4.dequantize_int4,
    w8a8.W8A8_FORMAT: w8a8.dequantize_w8a8,
    fp8.FP8_FORMAT: fp8.dequantize_fp8,
    **dict.fromkeys(INTERLEAVED_BITS, lanes.dequantize),
    **dict.fromkeys(PLANES_PER_WORD, planes.dequantize),
    **dict.fromkeys((MXFP4_GPU_PACKED, FP8_GPU_PACKED), planes.dequantize_float),
    mxfp4.MXFP4_FORMAT: mxfp4.dequantize_mxfp4,
    **dict.fromkeys(gguf.FORMATS, gguf.dequantize),
}


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`."""
    return DEQUANTIZERS[weight.format](weight, dtype)

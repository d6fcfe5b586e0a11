"""Dequantizes any packed format."""

import torch
from torch import Tensor

from localllm.quant.formats import gguf, gpu_packed, interleaved
from localllm.quant.formats.groups import dequantize_bytes, dequantize_int4, dequantize_mxfp4
from localllm.quant.packing import (
    FP8,
    FP8_GPU_PACKED,
    INT4,
    INT8,
    INTERLEAVED_BITS,
    MXFP4,
    MXFP4_GPU_PACKED,
    PLANES_PER_WORD,
    W8A8,
)
from localllm.quant.tensor import QuantizedTensor

DEQUANTIZERS = {
    INT8: dequantize_bytes,
    INT4: dequantize_int4,
    W8A8: dequantize_bytes,
    FP8: dequantize_bytes,
    **dict.fromkeys(INTERLEAVED_BITS, interleaved.dequantize),
    **dict.fromkeys(PLANES_PER_WORD, gpu_packed.dequantize),
    **dict.fromkeys((MXFP4_GPU_PACKED, FP8_GPU_PACKED), gpu_packed.dequantize_float),
    MXFP4: dequantize_mxfp4,
    **dict.fromkeys(gguf.FORMATS, gguf.dequantize),
}


def dequantize_rows(weight: QuantizedTensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of the weight with these indices in `dtype`. index: [n] int64 -> [n, in]"""
    if weight.format in INTERLEAVED_BITS:
        return interleaved.dequantize_rows(weight, index, dtype)
    return dequantize(weight.select_rows(index), dtype)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`."""
    return DEQUANTIZERS[weight.format](weight, dtype)

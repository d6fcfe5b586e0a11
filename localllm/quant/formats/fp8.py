"""FP8: floats of 1 byte (E4M3: 4 bits of exponent, 3 of mantissa, no infinity) and their groups' scales.

Parts: q [out, in] float8_e4m3fn; scale [out, groups], as localllm/quant/formats/groups.py says. Where a block of
rows shares a scale, each row has it.
"""

import torch
from torch import Tensor

from localllm.quant.formats.groups import apply_scales
from localllm.quant.packing import FP8
from localllm.quant.tensor import QuantizedTensor

FP8_FORMAT = FP8


def dequantize_fp8(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`."""
    return apply_scales(weight.parts["q"], weight, 0, dtype)

"""FP8: 1-byte floats (E4M3: 4 exponent bits, 3 mantissa bits, no infinity) with a scale per group.

Parts: q [out, in] float8_e4m3fn; scale [out, groups], see localllm/quant/formats/groups.py. If a block of rows
shares a scale, it is repeated for each row.
"""

import torch
from torch import Tensor

from localllm.quant.formats.groups import apply_scales
from localllm.quant.packing import FP8
from localllm.quant.tensor import QuantizedTensor

FP8_FORMAT = FP8


def dequantize_fp8(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`."""
    return apply_scales(weight.parts["q"], weight, 0, dtype)

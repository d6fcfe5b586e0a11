"""INT8: 1 byte per element, with a scale per group.

Parts: q [out, in] int8; others see localllm/quant/formats/groups.py; a row is one group if `group` is None.
Without zero points the format is symmetric.
"""

import torch
from torch import Tensor

from localllm.quant.formats.groups import apply_scales, expand_groups, split_groups
from localllm.quant.packing import INT8
from localllm.quant.tensor import QuantizedTensor

INT8_FORMAT = INT8
INT8_MAX = 127


def quantize_int8(weight: Tensor, scale_dtype: torch.dtype, group: int | None = None) -> QuantizedTensor:
    """Round to nearest, with the scale that maps the largest magnitude of a group to 127. weight: [out, in]"""
    rows, columns = weight.shape
    largest = split_groups(weight, group or columns).abs().amax(2)  # [out, groups]
    scale = (largest / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny).to(scale_dtype)
    steps = weight.float() / expand_groups(scale.float(), group or columns, columns)
    q = steps.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return QuantizedTensor(INT8_FORMAT, (rows, columns), {"q": q, "scale": scale}, group)


def dequantize_int8(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`."""
    return apply_scales(weight.parts["q"], weight, 0, dtype)

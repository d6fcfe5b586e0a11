"""INT8: 1 byte an element and its groups' scales.

Parts: q [out, in] int8, and as localllm/quant/formats/groups.py says; a row is one group where `group` is None.
Without zero points the format is symmetric.
"""

import torch
from torch import Tensor

from localllm.quant.formats.groups import grouped, scaled, spread
from localllm.quant.packing import INT8
from localllm.quant.tensor import QuantizedTensor

FORMAT = INT8
LARGEST = 127


def quantize(weight: Tensor, scale_dtype: torch.dtype, group: int | None = None) -> QuantizedTensor:
    """Round to nearest with the scale that maps the largest magnitude of a group to 127. weight: [out, in]"""
    rows, columns = weight.shape
    largest = grouped(weight, group or columns).abs().amax(2)  # [out, groups]
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny).to(scale_dtype)
    steps = weight.float() / spread(scale.float(), group or columns, columns)
    q = steps.round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return QuantizedTensor(FORMAT, (rows, columns), {"q": q, "scale": scale}, group)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`."""
    return scaled(weight.parts["q"], weight, 0, dtype)

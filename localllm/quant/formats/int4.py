"""INT4: half a byte per element, with a scale per group.

Parts: q [out, ceil(in / 2)] uint8, two codes of 0 to 15 per byte, the first in the low bits; others see
localllm/quant/formats/groups.py, with zero points in uint8. The default zero point is 8.
"""

import torch
from torch import Tensor

from localllm.quant.formats.groups import apply_scales
from localllm.quant.packing import INT4
from localllm.quant.tensor import QuantizedTensor

INT4_FORMAT = INT4
INT4_ZERO_POINT = 8
INT4_MAX = 15


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 15, uint8 [out, in] -> [out, ceil(in / 2)]."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, ::2] | (padded[:, 1::2] << 4)


def unpack_int4(q: Tensor, columns: int) -> Tensor:
    """Unpack uint8 [out, ceil(columns / 2)] -> codes [out, columns]."""
    return torch.stack((q & 15, q >> 4), -1).flatten(1)[:, :columns]


def dequantize_int4(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`."""
    return apply_scales(unpack_int4(weight.parts["q"], weight.shape[1]), weight, INT4_ZERO_POINT, dtype)

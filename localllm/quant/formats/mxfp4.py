"""MXFP4 (OCP Microscaling Formats 1.0): groups of 32 four-bit floats (E2M1) with a shared power of two (E8M0).

Parts: q [out, in / 32, 16] uint8, two values per byte, the first in the low bits; scale [out, in / 32] uint8, the
exponent plus 127. 0.53 bytes per element.
"""

import torch
from torch import Tensor

from localllm.quant.packing import MXFP4
from localllm.quant.tensor import QuantizedTensor

MXFP4_FORMAT = MXFP4
MXFP4_GROUP = 32
MXFP4_NAN_SCALE = 255
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_mxfp4(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`."""
    q, scale = weight.parts["q"], weight.parts["scale"]
    table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=q.device)
    values = table[torch.stack((q & 15, q >> 4), -1).long()].flatten(-2)  # [out, in / 32, 32]
    scaled = torch.ldexp(values, (scale.int() - 127)[..., None])
    return scaled.flatten(1)[:, : weight.shape[1]].to(dtype)

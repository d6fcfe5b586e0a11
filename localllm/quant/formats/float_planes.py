"""MXFP4 and FP8 in packed GPU layout: their codes in planes, like those of INT4 and INT8 in `planes.py`.

Parts: q as in that module, with E2M1 in four bits or E4M3 in eight; scale [groups, rows]: for MXFP4 uint8, the
exponent plus 127 of each 32 columns, for FP8 float16, bfloat16 or float32. Padding is zero.
"""

from dataclasses import replace

import torch
from torch import Tensor

from localllm.quant.formats import mxfp4, planes
from localllm.quant.formats.groups import expand_groups
from localllm.quant.packing import FP8_GPU_PACKED, INT4_GPU_PACKED, INT8_GPU_PACKED, MXFP4_GPU_PACKED
from localllm.quant.tensor import QuantizedTensor

# The integer format with the same layout.
INTEGER_LAYOUT = {MXFP4_GPU_PACKED: INT4_GPU_PACKED, FP8_GPU_PACKED: INT8_GPU_PACKED}


def pack_float_codes(form: str, codes: Tensor, group: int | None, scale: Tensor) -> QuantizedTensor:
    """Pack codes [out, in] of 0 to 15, or the bytes of E4M3 as int8. scale: [out, groups]"""
    packed = planes.pack_codes(codes, group, 4 if form == MXFP4_GPU_PACKED else 8, scale=scale)
    return replace(packed, format=form)


def unpack_codes(weight: QuantizedTensor) -> Tensor:
    """Return the codes, float32 [out, in]: 0 to 15, or -128 to 127."""
    q, scale = weight.parts["q"], weight.parts["scale"]
    one = torch.ones(1, scale.shape[1], device=q.device)
    parts = {"q": q, "scale": one, "zero": torch.zeros_like(one)}
    integers = QuantizedTensor(INTEGER_LAYOUT[weight.format], weight.shape, parts)
    return planes.dequantize(integers, torch.float32)


def dequantize_float(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`, computed in float32."""
    columns, codes, scale = weight.shape[1], unpack_codes(weight), weight.parts["scale"].T[: weight.shape[0]]
    if weight.format == MXFP4_GPU_PACKED:
        table = torch.tensor((*mxfp4.E2M1_VALUES, *(-value for value in mxfp4.E2M1_VALUES)), device=codes.device)
        values = torch.ldexp(table[codes.long()], expand_groups(scale, mxfp4.MXFP4_GROUP, columns).int() - 127)
    else:
        values = codes.to(torch.int8).view(torch.float8_e4m3fn).float()
        values *= expand_groups(scale.float(), weight.group or columns, columns)
    return values.to(dtype)

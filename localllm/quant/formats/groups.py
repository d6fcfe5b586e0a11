"""INT4, INT8, W8A8, FP8 and MXFP4: codes of 4 or 8 bits, with a scale per group of adjacent columns of a row.

w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g] with g = i // group; a row is one group if `group` is None. Parts:
- q: the codes. INT4: uint8 [out, ceil(in / 2)], two codes of 0 to 15 per byte, the first in the low bits; INT8 and
  W8A8: int8 [out, in]; FP8: float8_e4m3fn [out, in]; MXFP4: uint8 [out, in / 32, 16], two E2M1 values per byte;
- scale: [out, groups]; MXFP4: uint8, the exponent plus 127. If a block of rows shares a scale, it is repeated;
- zero: [out, groups], uint8 for INT4 and int8 for INT8; without it, the zero point is 8 for INT4 and 0 for INT8;
- columns: [in] int64, omitted if in order: stored column i is column columns[i] of the weight (GPTQ's act-order,
  which makes the columns of a group adjacent).

W8A8 has a scale per row, and its activations are quantized to INT8 with a scale per token:
y[t, o] = x_scale[t] * scale[o] * sum_i x_q[t, i] * q[o, i]. MXFP4: OCP Microscaling Formats 1.0.
"""

import torch
from torch import Tensor

from localllm.quant.packing import INT8
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor, device_table

INT4_ZERO_POINT = 8
INT6_ZERO_POINT = 32
INT4_MAX = 15
INT8_MAX = 127
MXFP4_GROUP = 32
MXFP4_NAN_SCALE = 255
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNED_E2M1_VALUES = (*E2M1_VALUES, *(-value for value in E2M1_VALUES))


def dequantize_int4(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return an INT4 weight [out, in] in `dtype`."""
    return apply_scales(unpack_int4(weight.parts["q"], weight.shape[1]), weight, INT4_ZERO_POINT, dtype)


def dequantize_bytes(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return an INT8, W8A8 or FP8 weight [out, in] in `dtype`."""
    return apply_scales(weight.parts["q"], weight, 0, dtype)


def dequantize_mxfp4(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return an MXFP4 weight [out, in] in `dtype`."""
    q, scale = weight.parts["q"], weight.parts["scale"]
    table = device_table(SIGNED_E2M1_VALUES, torch.float32, q.device)
    values = table[torch.stack((q & 15, q >> 4), -1).long()].flatten(-2)  # [out, in / 32, 32]
    scaled = torch.ldexp(values, (scale.int() - 127)[..., None])
    return scaled.flatten(1)[:, : weight.shape[1]].to(dtype)


def apply_scales(codes: Tensor, weight: QuantizedTensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`, computed in float32.

    codes: [out, in]; zero_point: default if not stored
    """
    columns, parts = weight.shape[1], weight.parts
    group = weight.group or columns
    values = codes.float()
    if "zero" in parts:
        values -= expand_groups(parts["zero"].float(), group, columns)
    elif zero_point:
        values -= zero_point
    values *= expand_groups(parts["scale"].float(), group, columns)
    if COLUMN_ORDER in parts:
        values = torch.empty_like(values).index_copy_(1, parts[COLUMN_ORDER], values)
    return values.to(dtype)


def quantize_int8(weight: Tensor, scale_dtype: torch.dtype, group: int | None = None) -> QuantizedTensor:
    """Round to nearest, with the scale that maps the largest magnitude of a group to 127. weight: [out, in]"""
    rows, columns = weight.shape
    largest = split_groups(weight, group or columns).abs().amax(2)  # [out, groups]
    scale = (largest / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny).to(scale_dtype)
    steps = weight.float() / expand_groups(scale.float(), group or columns, columns)
    q = steps.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return QuantizedTensor(INT8, (rows, columns), {"q": q, "scale": scale}, group)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [..., in] to integers of -127 to 127 in float32, with float32 scales [..., 1].

    A scale maps a token's largest magnitude to 127.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round(), scale


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 15, uint8 [out, in] -> [out, ceil(in / 2)]."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, ::2] | (padded[:, 1::2] << 4)


def unpack_int4(q: Tensor, columns: int) -> Tensor:
    """Unpack uint8 [out, ceil(columns / 2)] -> codes [out, columns]."""
    return torch.stack((q & 15, q >> 4), -1).flatten(1)[:, :columns]


def group_count(columns: int, group: int) -> int:
    return -(-columns // group)


def expand_groups(numbers: Tensor, group: int, columns: int) -> Tensor:
    """Expand one value per group to one per column. numbers: [out, groups] -> [out, columns]"""
    if numbers.shape[1] == 1:
        return numbers.expand(-1, columns)
    return numbers.repeat_interleave(group, 1)[:, :columns]


def split_groups(weight: Tensor, group: int) -> Tensor:
    """Split [out, in] to float32 [out, groups, group], padding a shorter last group with zeros."""
    missing = -weight.shape[1] % group
    return torch.nn.functional.pad(weight.float(), (0, missing)).unflatten(1, (-1, group))

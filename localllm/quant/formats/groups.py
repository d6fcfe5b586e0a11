"""Parts that integer formats share: rows are divided into groups of adjacent columns with a scale each.

w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g] with g = i // group. Parts besides the codes: scale [out, groups];
zero [out, groups], omitted for the format's default zero point; columns [in] int64, omitted if in order: stored
column i is column columns[i] of the weight (GPTQ's act-order, which makes the columns of a group adjacent).
"""

import torch
from torch import Tensor

from localllm.quant.tensor import QuantizedTensor


def group_count(columns: int, group: int) -> int:
    return -(-columns // group)


def expand_groups(numbers: Tensor, group: int, columns: int) -> Tensor:
    """Expand one value per group to one per column. numbers: [out, groups] -> [out, columns]"""
    if numbers.shape[1] == 1:
        return numbers.expand(-1, columns)
    return numbers.repeat_interleave(group, 1)[:, :columns]


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
    if "columns" in parts:
        values = torch.empty_like(values).index_copy_(1, parts["columns"], values)
    return values.to(dtype)


def split_groups(weight: Tensor, group: int) -> Tensor:
    """Split [out, in] to float32 [out, groups, group], padding a shorter last group with zeros."""
    missing = -weight.shape[1] % group
    return torch.nn.functional.pad(weight.float(), (0, missing)).unflatten(1, (-1, group))

"""What formats of whole numbers share: rows cut into groups of neighbours, each with a scale, maybe a zero point.

w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g] with g = i // group. Parts besides the codes: scale [out, groups];
zero [out, groups], left out where it is the format's middle; columns [in] int64, left out where they are in order:
then stored column i is column columns[i] of the weight (GPTQ's act-order: groups are neighbours again).
"""

import torch
from torch import Tensor

from localllm.quant.tensor import QuantizedTensor


def group_count(columns: int, group: int) -> int:
    return -(-columns // group)


def expand_groups(numbers: Tensor, group: int, columns: int) -> Tensor:
    """One number a group -> one a column. numbers: [out, groups] -> [out, columns]"""
    if numbers.shape[1] == 1:
        return numbers.expand(-1, columns)
    return numbers.repeat_interleave(group, 1)[:, :columns]


def apply_scales(codes: Tensor, weight: QuantizedTensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    """codes: [out, in] -> the weight [out, in] in `dtype`, computed in float32. zero_point: the zero point of
    formats
    that store none."""
    columns, parts = weight.shape[1], weight.parts
    group = weight.group or columns
    exact = codes.float()
    if "zero" in parts:
        exact -= expand_groups(parts["zero"].float(), group, columns)
    elif zero_point:
        exact -= zero_point
    exact *= expand_groups(parts["scale"].float(), group, columns)
    if "columns" in parts:
        exact = torch.empty_like(exact).index_copy_(1, parts["columns"], exact)
    return exact.to(dtype)


def split_groups(weight: Tensor, group: int) -> Tensor:
    """[out, in] -> float32 [out, groups, group]; a shorter last group is filled with zeros."""
    missing = -weight.shape[1] % group
    return torch.nn.functional.pad(weight.float(), (0, missing)).unflatten(1, (-1, group))

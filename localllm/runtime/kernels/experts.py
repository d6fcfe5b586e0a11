"""A mixture of experts: each token's k chosen experts, weighted and added.

At decode only the chosen experts' weights are read: k / experts of all. At prefill the tokens of one expert go
through it together, so that each expert is read once. The sum runs over experts in ascending order, whatever else
is in the batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def experts(x: Tensor, chosen: Tensor, weight: Tensor, mlps: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """x: [T, hidden]; chosen: [T, k] int64; weight: [T, k] float32; mlps: one an expert -> [T, hidden]"""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    order = chosen.flatten().argsort(stable=True)  # pairs of token and expert, by expert
    token, share = order // chosen.shape[1], weight.flatten()[order]
    found, counts = chosen.unique(return_counts=True)
    begin = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        mine = slice(begin, begin + count)
        rows = token[mine]
        out.index_add_(0, rows, mlps[expert](x[rows]).float() * share[mine, None])
        begin += count
    return out.to(x.dtype)

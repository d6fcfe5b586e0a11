"""A mixture of experts: the weighted sum of each token's k selected experts.

In decoding, only the selected experts' weights are read: k / experts of all. In prefill, the tokens of one expert
are processed together, so that each expert is read once. The sum runs over experts in ascending order, regardless
of the other tokens of the batch.

On a GPU with a kernel for it, the experts of a layer are stacked, so that the host need not wait to learn which
were selected; elsewhere, each is a function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.dequantize import dequantize
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.elementwise import gated_activation
from localllm.runtime.kernels.registry import choose, find, kernel


@dataclass(frozen=True)
class StackedExperts:
    """The MLPs of a layer's experts, stacked by rows: down(gated(gate_up(x))), with intermediate size n.

    In the packed GPU layout, each expert begins at a multiple of 16 rows.
    """

    gate_up: Tensor | QuantizedTensor  # [experts * 2 n, hidden]: an expert's gate rows, then its up rows
    down: Tensor | QuantizedTensor  # [experts * hidden, n]
    gate_up_bias: Tensor | None  # [experts * 2 n]
    down_bias: Tensor | None  # [experts * hidden]
    activation: Activation
    count: int  # number of experts

    def expert_mlps(self, dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
        """Return each expert as a function, with dequantized weights."""

        def split_rows(weight: Tensor | QuantizedTensor, rows: int) -> Tensor:
            dense = weight if isinstance(weight, Tensor) else dequantize(weight, dtype)
            return dense.to(dtype).unflatten(0, (self.count, -1))[:, :rows]

        def biases(bias: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * self.count if bias is None else bias.to(dtype).chunk(self.count)

        hidden, n = self.gate_up.shape[1], self.down.shape[1]
        gate_up, down = split_rows(self.gate_up, 2 * n), split_rows(self.down, hidden)
        gate_up_bias, down_bias = biases(self.gate_up_bias), biases(self.down_bias)

        def mlp(expert: int) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                h = gated_activation(F.linear(x, gate_up[expert], gate_up_bias[expert]), self.activation)
                return F.linear(h, down[expert], down_bias[expert])

            return run

        return [mlp(expert) for expert in range(self.count)]


Experts = Sequence[Callable[[Tensor], Tensor]] | StackedExperts


def experts(x: Tensor, expert_ids: Tensor, weight: Tensor, mlps: Experts) -> Tensor:
    """Return the weighted sum of the selected experts, [T, hidden].

    x: [T, hidden]; expert_ids: [T, k] int64, distinct for each token; weight: [T, k] float32; mlps: one per
    expert, or all stacked. Without stacking, ids that no expert in `mlps` has are left out of the sum.
    """
    return choose("experts", x, expert_ids, weight, mlps).run(x, expert_ids, weight, mlps)


def supports_stacked(x: Tensor, stacked: StackedExperts) -> bool:
    """Return whether there is a kernel for these experts when they are stacked."""
    return find("experts", x, None, None, stacked).run is not experts_reference


@kernel("experts", "reference")
def experts_reference(x: Tensor, expert_ids: Tensor, weight: Tensor, mlps: Experts) -> Tensor:
    if isinstance(mlps, StackedExperts):
        mlps = mlps.expert_mlps(x.dtype)
    out = torch.zeros(x.shape, dtype=weight.dtype, device=x.device)
    order = expert_ids.flatten().argsort(stable=True)  # (token, expert) pairs, sorted by expert
    token, pair_weight = order // expert_ids.shape[1], weight.flatten()[order]
    used_experts, counts = expert_ids.unique(return_counts=True)
    begin = 0
    for expert, count in zip(used_experts.tolist(), counts.tolist(), strict=True):
        pair_slice = slice(begin, begin + count)
        begin += count
        if not 0 <= expert < len(mlps):
            continue
        tokens = token[pair_slice]
        out.index_add_(0, tokens, mlps[expert](x[tokens]).to(weight.dtype) * pair_weight[pair_slice, None])
    return out.to(x.dtype)

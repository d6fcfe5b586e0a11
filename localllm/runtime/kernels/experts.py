"""A mixture of experts: each token's k chosen experts, weighted and added.

At decode only the chosen experts' weights are read: k / experts of all. At prefill the tokens of one expert go
through it together, so that each expert is read once. The sum runs over experts in ascending order, whatever else
is in the batch.

On a GPU that has a kernel for it the experts of a layer are stacked, so that nothing waits for the host to learn
which of them were chosen; elsewhere each is a function of its own.
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
    """The MLPs of a layer's experts, one below the other: down(gated(gate_up(x))), n of them. Those in planes
    begin at whole 16s of rows."""

    gate_up: Tensor | QuantizedTensor  # [experts * 2 n, hidden]: an expert's gates, then what they gate
    down: Tensor | QuantizedTensor  # [experts * hidden, n]
    gate_up_bias: Tensor | None  # [experts * 2 n]
    down_bias: Tensor | None  # [experts * hidden]
    activation: Activation
    count: int  # of experts

    def expert_mlps(self, dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
        """Each as a function of its own, its weights dequantized."""

        def of_each(weight: Tensor | QuantizedTensor, rows: int) -> Tensor:
            plain = weight if isinstance(weight, Tensor) else dequantize(weight, dtype)
            return plain.to(dtype).unflatten(0, (self.count, -1))[:, :rows]

        def biases(bias: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * self.count if bias is None else bias.to(dtype).chunk(self.count)

        hidden, n = self.gate_up.shape[1], self.down.shape[1]
        gate_up, down = of_each(self.gate_up, 2 * n), of_each(self.down, hidden)
        gate_up_bias, down_bias = biases(self.gate_up_bias), biases(self.down_bias)

        def mlp(expert: int) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                h = gated_activation(F.linear(x, gate_up[expert], gate_up_bias[expert]), self.activation)
                return F.linear(h, down[expert], down_bias[expert])

            return run

        return [mlp(expert) for expert in range(self.count)]


Experts = Sequence[Callable[[Tensor], Tensor]] | StackedExperts


def experts(x: Tensor, expert_ids: Tensor, weight: Tensor, mlps: Experts) -> Tensor:
    """x: [T, hidden]; expert_ids: [T, k] int64, a token's all different; weight: [T, k] float32; mlps: one an
    expert,
    or all stacked -> [T, hidden]"""
    return choose("experts", x, expert_ids, weight, mlps).run(x, expert_ids, weight, mlps)


def supports_stacked(x: Tensor, stacked: StackedExperts) -> bool:
    """Is there a kernel for such experts, when they are stacked?"""
    return find("experts", x, None, None, stacked).run is not experts_reference


@kernel("experts", "reference")
def experts_reference(x: Tensor, expert_ids: Tensor, weight: Tensor, mlps: Experts) -> Tensor:
    if isinstance(mlps, StackedExperts):
        mlps = mlps.expert_mlps(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    order = expert_ids.flatten().argsort(stable=True)  # pairs of token and expert, by expert
    token, share = order // expert_ids.shape[1], weight.flatten()[order]
    found, counts = expert_ids.unique(return_counts=True)
    begin = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        mine = slice(begin, begin + count)
        rows = token[mine]
        out.index_add_(0, rows, mlps[expert](x[rows]).float() * share[mine, None])
        begin += count
    return out.to(x.dtype)

"""Stacked experts under the interpreter, beside experts that are called one by one."""

import pytest
import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.experts import Stacked
from tests.runtime.kernels.harness import check

pytestmark = pytest.mark.usefixtures("interpreter")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).bfloat16()


def plain(experts: int, hidden: int, n: int, activation: Activation = "silu", *, biases: bool = False) -> Stacked:
    gate_up, down = drawn(experts * 2 * n, hidden) / 4, drawn(experts * hidden, n, seed=1) / 4
    bias = (drawn(experts * 2 * n, seed=2), drawn(experts * hidden, seed=3)) if biases else (None, None)
    return Stacked(gate_up, down, *bias, activation, experts)


def routed(tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """chosen, weight"""
    score = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    top = score.topk(k, -1)
    return top.indices, top.values


def compare(tokens: int, mlps: Stacked, chosen: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    x = drawn(tokens, mlps.gate_up.shape[1], seed=5)
    assert check("experts", lambda d: (x.to(d), chosen, weight, cast(mlps, d)), dtype) == ["triton-grouped"]


def cast(mlps: Stacked, dtype: torch.dtype) -> Stacked:
    def to(part: Tensor | QuantizedTensor | None):
        return part.to(dtype) if isinstance(part, Tensor) else part

    parts = [to(part) for part in (mlps.gate_up, mlps.down, mlps.gate_up_bias, mlps.down_bias)]
    return Stacked(*parts, mlps.activation, mlps.count)


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_experts(tokens: int, dtype: torch.dtype) -> None:
    mlps = plain(5, 40, 24, biases=tokens % 2 == 1)
    compare(tokens, mlps, *routed(tokens, 5, 3), dtype)

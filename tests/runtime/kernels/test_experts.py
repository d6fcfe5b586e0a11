import pytest
import torch
from torch import Tensor

from localllm.runtime.kernels import experts

EXPERTS, CHOSEN, HIDDEN = 6, 2, 8


def mixture(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator)
    score = torch.rand(rows, EXPERTS, generator=generator)
    top = score.topk(CHOSEN, -1)
    return x, top.indices, top.values


class CountingExpert:
    """An expert that records the number of tokens of each call."""

    def __init__(self, index: int):
        self.matrix = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(index))
        self.calls: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return x @ self.matrix


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_a_token_gets_the_weighted_sum_of_its_experts(rows: int) -> None:
    x, chosen, weight = mixture(rows)
    mlps = [CountingExpert(index) for index in range(EXPERTS)]
    expected = torch.stack(
        [
            torch.stack([w * (row @ mlps[e].matrix) for e, w in zip(picks.tolist(), weights, strict=True)]).sum(0)
            for row, picks, weights in zip(x, chosen, weight, strict=True)
        ]
    )
    torch.testing.assert_close(experts(x, chosen, weight, mlps), expected, atol=1e-5, rtol=0)


def test_one_token_reads_only_its_experts() -> None:
    x, chosen, weight = mixture(1)
    mlps = [CountingExpert(index) for index in range(EXPERTS)]
    experts(x, chosen, weight, mlps)
    assert {index for index, mlp in enumerate(mlps) if mlp.calls} == set(chosen[0].tolist())


def test_many_tokens_go_through_an_expert_together() -> None:
    x, chosen, weight = mixture(40)
    mlps = [CountingExpert(index) for index in range(EXPERTS)]
    experts(x, chosen, weight, mlps)
    assert [mlp.calls for mlp in mlps] == [[count] for count in chosen.flatten().bincount().tolist()]

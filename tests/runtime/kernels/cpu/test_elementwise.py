"""Activations and RMSNorm against their formulas in float64."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from localllm.arch.config import Activation
from localllm.runtime.kernels import rms_norm
from localllm.runtime.kernels.cpu.elementwise import gated_activation, map_elements, supports, supports_rms_norm
from localllm.runtime.kernels.elementwise import gated_activation_reference, map_in_vectors
from tests.runtime.kernels.harness import check

FUNCTIONS = {"silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_functions(name: str, dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-90, 90, 1003), torch.linspace(-3, 3, 500))).to(dtype)
    exact = FUNCTIONS[name](x.double())
    error = (map_elements(x, name).double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps * exact.abs() + 3e-7).all()
    for begin in (0, 700, 1490):
        for end in (begin + 1, begin + 7):
            assert torch.equal(map_elements(x[begin:end], name), map_elements(x, name)[begin:end])
    assert map_elements(torch.tensor([torch.nan]), name).isnan().all()


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 14), (3, 64), (33, 224)])
def test_gates(activation: Activation, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).bfloat16() * 4
    assert check("gated", lambda d: (x.to(d), activation), dtype) == ["cpu-numbers"]
    whole = gated_activation(x, activation)
    assert all(torch.equal(gated_activation(x[i : i + 1], activation), whole[i : i + 1]) for i in range(len(x)))


def test_nan_stays() -> None:
    x = torch.tensor([[torch.nan, 1.0, 1.0, 2.0], [1.0, 1.0, torch.nan, 2.0]])
    for activation in get_args(Activation):
        assert gated_activation(x, activation).isnan().tolist() == [[True, False], [True, False]]
        assert gated_activation_reference(x, activation).isnan().tolist() == [[True, False], [True, False]]


def test_declined_calls() -> None:
    assert (
        not supports(torch.zeros(3).double())
        and not supports(torch.zeros(0))
        and not supports(torch.zeros(3).int())
    )


def test_torch_functions_are_position_independent() -> None:
    x = torch.randn(5, 77, generator=torch.Generator().manual_seed(0)) * 30
    whole = map_in_vectors(torch.cos, x)
    assert all(torch.equal(map_in_vectors(torch.cos, x[i : i + 1]), whole[i : i + 1]) for i in range(5))
    torch.testing.assert_close(whole, x.cos())


# RMSNorm against its formula in float64.


@pytest.mark.parametrize("shape", [(1, 64), (3, 2048), (40, 96), (5, 4, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows(shape: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.rand(shape[-1], generator=generator) if weighted else None
    assert supports_rms_norm(x, weight)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = exact if weight is None else exact * weight
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype and found.shape == shape
    error = (found.double() - expected).abs()
    assert (error <= (torch.finfo(dtype).eps + 2e-6) * expected.abs() + 1e-7).all()


def test_epsilon_counts_and_nan_stays() -> None:
    x = torch.full((2, 32), 1e-4)
    torch.testing.assert_close(rms_norm(x, None, 1e-2), x / (1e-8 + 1e-2) ** 0.5)
    x[0, 5] = torch.nan
    assert rms_norm(x, None, 1e-5)[0].isnan().all() and rms_norm(x, None, 1e-5)[1].isfinite().all()


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 40), torch.zeros(4, 64)[:, ::2], torch.zeros(0, 32), torch.zeros(2, 32).double()]
)
def test_declined_calls_run_in_torch(x: torch.Tensor) -> None:
    assert not supports_rms_norm(x, None)
    assert rms_norm(x, None, 1e-5).shape == x.shape


def test_a_weight_of_another_size_or_dtype_is_not_read() -> None:
    x = torch.zeros(2, 32)
    assert supports_rms_norm(x, torch.ones(32)) and not supports_rms_norm(x, torch.ones(32).double())
    assert not supports_rms_norm(x, torch.ones(16))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        rms_norm(x, torch.ones(16), 1e-5)

"""Norms and activations under Triton's interpreter against the formulas in plain torch."""

import pytest
import torch
from torch import Tensor

from localllm.runtime.kernels.elementwise import gated_activation_reference
from localllm.runtime.kernels.gpu import norms
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import KERNELS, explain
from tests.runtime.kernels.harness import APPROXIMATED, check_on_gpu

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(3, 100), (17, 128), (2, 3, 5), (1, 2049), (1, 1, 1)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16().double()


def with_gaps(x: Tensor) -> Tensor:
    """The same values, surrounded by NaN."""
    held = torch.full((*x.shape[:-1], x.shape[-1] + 7), torch.nan, dtype=x.dtype)
    held[..., 3:-4] = x
    return held[..., 3:-4]


def exactly(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], weighted: bool, dtype: torch.dtype) -> None:
    def make(d: torch.dtype) -> tuple[Tensor, Tensor | None, float]:
        weight = numbers(shape[-1], seed=1).to(exactly(d)) if weighted else None
        return with_gaps(numbers(*shape).to(d)), weight, 1e-5

    assert check_on_gpu("rms_norm", make, dtype) == ["triton-rows"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def make(d: torch.dtype) -> tuple[Tensor, Tensor, float]:
        return with_gaps(numbers(*shape).to(d) + 3), numbers(shape[-1], seed=1).to(exactly(d)), 1e-5

    assert check_on_gpu("layer_norm", make, dtype) == ["triton-rows"]


@pytest.mark.parametrize("operation", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("columns", [norms.MAX_REGISTER_COLUMNS + 1, norms.MAX_COLUMNS])
def test_long_rows(columns: int, operation: str) -> None:
    def make(d: torch.dtype) -> tuple[Tensor, Tensor, float]:
        return with_gaps(numbers(2, columns).to(d) + 1), numbers(columns, seed=1).to(exactly(d)), 1e-5

    assert check_on_gpu(operation, make, torch.bfloat16) == ["triton-rows"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_rms_norm_reads_its_gate_where_it_lies(dtype: torch.dtype) -> None:
    def make(d: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
        gate = with_gaps(numbers(5, 3 * 24, seed=2).to(d)).unflatten(-1, (3, 24))
        return numbers(5, 3, 24).to(d), gate, numbers(24, seed=1).to(exactly(d)), 1e-5

    assert check_on_gpu("gated_rms_norm", make, dtype, APPROXIMATED) == ["triton-rows"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit(dtype: torch.dtype) -> None:
    def make(d: torch.dtype) -> tuple[Tensor]:
        x = with_gaps(numbers(5, 8 * 24).to(d)).unflatten(-1, (8, 24))
        return (x[:, 1:-1],)

    assert check_on_gpu("unit", make, dtype) == ["triton-rows"]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_add_normed(scale: float, kind: str) -> None:
    def make(d: torch.dtype) -> tuple[Tensor, Tensor, Norm, float]:
        weight = numbers(72, seed=1).to(exactly(d))
        return numbers(3, 72, seed=2).to(d), numbers(3, 72).to(d), Norm(weight, 1e-6, kind), scale

    assert check_on_gpu("add_normed", make, torch.bfloat16) == ["triton-rows"]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + infinity) is what is meant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_clamped"])
@pytest.mark.parametrize("shape", [(1, 32), (3, 2 * 1025), (2, 2, 14)], ids=str)
def test_gated(shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> None:
    def make(d: torch.dtype) -> tuple[Tensor, str]:
        return with_gaps(6 * numbers(*shape).to(d)), activation

    assert check_on_gpu("gated", make, dtype, APPROXIMATED) == ["triton-rows"]


def test_nan_stays_nan() -> None:
    x = torch.tensor([[torch.nan, 1.0, 2.0, 1.0]])
    for activation in ("silu", "gelu", "gelu_tanh", "swiglu_clamped"):
        assert KERNELS["gated"][0].run(x, activation).isnan().tolist() == [[True, False]]
        assert gated_activation_reference(x, activation).isnan().tolist() == [[True, False]]
    assert KERNELS["rms_norm"][0].run(x, None, 1e-5).isnan().all()


def test_no_rows_are_no_work() -> None:
    assert KERNELS["rms_norm"][0].run(torch.empty(0, 8), None, 1e-5).shape == (0, 8)
    assert KERNELS["gated"][0].run(torch.empty(0, 8), "silu").shape == (0, 4)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = numbers(40, 96).bfloat16(), numbers(96).float()
    together = KERNELS["rms_norm"][0].run(x, weight, 1e-5)
    for i in (0, 7, 39):
        assert torch.equal(KERNELS["rms_norm"][0].run(x[i : i + 1], weight, 1e-5)[0], together[i])


def test_reasons() -> None:
    assert dict(explain("rms_norm", torch.empty(1, norms.MAX_COLUMNS + 1), None, 1e-5))["triton-rows"] != "ok"
    assert dict(explain("rms_norm", torch.empty(1, 8, dtype=torch.float64), None, 1e-5))["triton-rows"] != "ok"
    halves = torch.empty(8, dtype=torch.bfloat16)
    assert dict(explain("rms_norm", torch.empty(1, 8), halves, 1e-5))["triton-rows"] != "ok"

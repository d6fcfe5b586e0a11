"""Norm, product and residual of one row in one kernel: the bits of the operations one after another."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.fused import cpu_row_unsupported, fused_linear_cpu_row, fused_linear_reference
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.layers.norm import BiasedLayerNorm
from tests.quant.formats.test_interleaved import blocks, integers
from tests.runtime.kernels.cpu.test_quantized_matmul import laned

COLUMNS = 512


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def norm_of(name: str) -> Norm | None:
    weight = 1 + numbers(COLUMNS) / 4
    return {
        "none": None,
        "rms": Norm(weight, 1e-5),
        "rms without a weight": Norm(None, 1e-5),
        "layer": Norm(weight, 1e-5, "layer"),
        "biased": BiasedLayerNorm(weight, 1e-5, "layer", bias=numbers(COLUMNS)),
    }[name]


def check(weights: tuple[QuantizedTensor, ...], dtype: torch.dtype, norm: str, **optional) -> None:
    x, rows = numbers(1, COLUMNS).to(dtype), sum(weight.shape[0] for weight in weights)
    given = {"bias": None, "activation": None, "residual": None} | {
        name: numbers(*(shape if isinstance(shape, tuple) else (shape,))).to(dtype)
        if name != "activation"
        else shape
        for name, shape in optional.items()
    }
    arguments = (x, weights, given["bias"], norm_of(norm), given["activation"], given["residual"])
    assert cpu_row_unsupported(*arguments) is None
    y = fused_linear_cpu_row(*arguments)
    assert y.shape == (1, rows // (2 if given["activation"] else 1))
    assert torch.equal(y, fused_linear_reference(*arguments))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["none", "rms", "rms without a weight", "layer", "biased"])
def test_bits_are_those_of_the_reference(norm: str, dtype: torch.dtype) -> None:
    weights = laned(blocks("q4_k", 64, COLUMNS)), replace(laned(blocks("q6_k", 32, COLUMNS)), activation_bits=16)
    check(weights, dtype, norm)
    check(weights, dtype, norm, residual=(1, 96))
    check(weights, dtype, norm, bias=96, residual=(1, 96))
    check(weights, dtype, norm, bias=96, activation="silu")


def test_rows_that_fill_no_tile() -> None:
    check((laned(blocks("q8_0", 37, COLUMNS)),), torch.float32, "rms", residual=(1, 37))


@pytest.mark.parametrize("columns", [None, COLUMNS])
def test_weights_that_reorder_or_pad_columns(columns: int | None) -> None:
    weight = integers("int4", 32, COLUMNS, 128)
    if columns:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(0))
        weight = replace(weight, parts=weight.parts | {"columns": order})
    check((laned(weight),), torch.float32, "rms", residual=(1, 32))


def test_other_calls_are_left_to_the_reference() -> None:
    weight, whole = laned(blocks("q8_0", 37, COLUMNS)), laned(blocks("q8_0", 32, COLUMNS))
    x = numbers(1, COLUMNS)
    assert cpu_row_unsupported(numbers(2, COLUMNS), (whole,), None, None, None, None)
    assert cpu_row_unsupported(x.double(), (whole,), None, None, None, None)
    assert cpu_row_unsupported(x, (numbers(4, COLUMNS),), None, None, None, None)
    assert cpu_row_unsupported(x, (weight, whole), None, None, None, None)


def test_a_prepared_call_is_used_again() -> None:
    weight, x = laned(blocks("q8_0", 32, COLUMNS)), numbers(1, COLUMNS)
    first = fused_linear_cpu_row(x, (weight,), None, None, None, None)
    [call] = weight.prepared.values()
    assert torch.equal(fused_linear_cpu_row(x, (weight,), None, None, None, None), first)
    assert [*weight.prepared.values()] == [call]
    assert not replace(weight, activation_bits=16).prepared

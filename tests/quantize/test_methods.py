"""The quantization methods against plain references in float32."""

import pytest
import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.groups import quantize_int8
from localllm.quant.grid import Grid, fit, quantize_rtn, second_moments
from localllm.quantize import awq, gptq, smoothquant
from localllm.quantize.inputs import MAX_SAMPLES, InputStatistics

GRIDS = [
    Grid(bits, group, symmetric) for bits in (4, 8) for group in (32, 128, None) for symmetric in (True, False)
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Inputs like those in models: all columns correlated, some large."""
    x = drawn(rows, columns, seed=seed) @ (torch.eye(columns) + 0.3 * drawn(columns, columns, seed=2))
    return x * (1 + 6 * (torch.arange(columns) % 9 == 0))


def heard(x: Tensor, hessian: bool = False) -> InputStatistics:
    inputs = InputStatistics(x.shape[1], 1, hessian)
    inputs.add(x)
    return inputs


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_weight_becomes_the_nearest_number_of_its_grid(grid: Grid) -> None:
    weight = drawn(5, 75)
    made = quantize_rtn(weight, grid)
    became, group = dequantize(made, torch.float32), grid.group or 75
    middle = torch.tensor(float(grid.zero_point))
    for row in range(5):
        for column in range(75):
            scale = made.parts["scale"][row, column // group]
            zero = made.parts["zero"][row, column // group] if "zero" in made.parts else middle
            numbers = (torch.arange(grid.min_code, grid.max_code + 1) - zero) * scale
            nearest = (numbers - weight[row, column]).abs().min()
            assert (became[row, column] - weight[row, column]).abs() <= nearest + 1e-6


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_search_for_scales_is_never_worse_than_the_whole_range(grid: Grid) -> None:
    weight = drawn(16, 200) ** 3  # heavy tails: cutting them off pays
    error = (dequantize(quantize_rtn(weight, grid), torch.float32) - weight).square().sum()
    whole = torch.zeros(())
    for cut in weight.split(grid.group or 200, 1):
        if grid.symmetric:
            scale = cut.abs().amax(1, keepdim=True) / (7.5 if grid.bits == 4 else 127)
            low, high = (-8, 7) if grid.bits == 4 else (-127, 127)
            whole += ((cut / scale).round().clamp(low, high) * scale - cut).square().sum()
        else:
            low, high = cut.amin(1, keepdim=True).clamp(max=0), cut.amax(1, keepdim=True).clamp(min=0)
            scale = (high - low) / (2**grid.bits - 1)
            zero = (-low / scale).round()
            codes = ((cut / scale).round() + zero).clamp(0, 2**grid.bits - 1)
            whole += ((codes - zero) * scale - cut).square().sum()
    assert error <= whole * (1 + 1e-5)
    assert grid.bits == 8 or error < 0.99 * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros_and_scales_are_as_they_are_stored(dtype: torch.dtype) -> None:
    weight = drawn(4, 64)
    weight[:, :32] = 0
    for symmetric in (True, False):
        made = quantize_rtn(weight.to(dtype), Grid(4, 32, symmetric, dtype))
        assert made.parts["scale"].dtype == dtype
        assert (made.parts["scale"] > 0).all()
        became = dequantize(made, torch.float32)
        assert (became[:, :32] == 0).all()
        assert torch.isfinite(became).all()


@pytest.mark.parametrize(
    "grid", [Grid(8, None, scale_dtype=torch.float16), Grid(4, 32, scale_dtype=torch.float16)]
)
def test_small_weights_in_float16_lose_no_more_than_others(grid: Grid) -> None:
    def lost(weight: Tensor) -> float:
        return ((dequantize(quantize_rtn(weight, grid), torch.float32) - weight).norm() / weight.norm()).item()

    weight = drawn(16, 256)
    assert lost(weight * 1e-3) < 1.05 * lost(weight)


def test_moments_weigh_the_error_of_each_group() -> None:
    weight, x = drawn(6, 64), correlated(300, 64)
    grid = Grid(4, 32)

    def felt(scale: Tensor) -> Tensor:
        """Error of the output, computed group by group."""
        wide = scale.repeat_interleave(32, 1)
        off = (weight / wide).round().clamp(-8, 7) * wide - weight
        return torch.stack([(x[:, g : g + 32] @ off[:, g : g + 32].T).square().sum(0) for g in (0, 32)], 1)

    plain, weighed = fit(weight, grid).scale, fit(weight, grid, second_moments(x, 32)).scale
    assert (felt(weighed) <= felt(plain) * (1 + 1e-4)).all()
    assert felt(weighed).sum() < 0.95 * felt(plain).sum()


def naive_gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Quantize column by column, with a new inverse of the remainder for each (Frantar et al. 2022, equations 2
    and 3).
    """
    columns = weight.shape[1]
    group = grid.group or columns
    padded = torch.nn.functional.pad(hessian.diagonal(), (0, -columns % group)).view(-1, group)
    fitted = fit(weight, grid, padded)
    w, made = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.float64)
    damped = hessian.double() + 0.01 * hessian.diagonal().mean().double() * torch.eye(columns)
    left = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    while left:
        inverse = torch.linalg.inv(damped[left][:, left])
        column = left[0]
        scale = fitted.scale[:, column // group].double()
        zero = grid.zero_point if fitted.zero is None else fitted.zero[:, column // group]
        code = (w[:, column] / scale + zero).round().clamp(grid.min_code, grid.max_code)
        made[:, column] = (code - zero) * scale
        error = (w[:, column] - made[:, column]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return made


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, False), Grid(4, None), Grid(8, 128)], ids=str)
def test_gptq_is_the_column_by_column_rule(grid: Grid) -> None:
    weight, x = drawn(24, 172), correlated(600, 172)  # beyond one block of columns, and a shorter last group
    made = dequantize(gptq.quantize(weight, x.T @ x, grid), torch.float32)
    expected = naive_gptq(weight, x.T @ x, grid).float()
    same = (made - expected).abs() < 1e-5
    assert same.float().mean() > 0.99  # float32 against float64: what lies halfway may fall to either side
    assert outputs_off(x, made, weight) < 1.01 * outputs_off(x, expected, weight)
    assert outputs_off(x, made, weight) < 0.8 * outputs_off(
        x, dequantize(quantize_rtn(weight, grid), x.dtype), weight
    )


def outputs_off(x: Tensor, made: Tensor, weight: Tensor) -> float:
    return (x @ (made - weight).T).square().sum().item()


def test_columns_that_no_input_reached_are_rounded_to_nearest() -> None:
    weight, x = drawn(8, 64), correlated(300, 64)
    x[:, 10:20] = 0
    grid = Grid(8, None)
    made = dequantize(gptq.quantize(weight, x.T @ x, grid), torch.float32)
    scale = fit(weight, grid, (x.T @ x).diagonal()[None]).scale
    nearest = ((weight / scale).round().clamp(-127, 127) * scale)[:, 10:20]
    torch.testing.assert_close(made[:, 10:20], nearest)


def test_fewer_inputs_than_columns_are_damped_until_there_is_an_inverse() -> None:
    weight, x = drawn(8, 96), correlated(3, 96) * 1e4
    made = dequantize(gptq.quantize(weight, x.T @ x, Grid(4, 32)), torch.float32)
    assert torch.isfinite(made).all()
    assert outputs_off(x, made, weight) < outputs_off(
        x, dequantize(quantize_rtn(weight, Grid(4, 32)), x.dtype), weight
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_moments_that_are_not_finite_have_no_inverse(value: float) -> None:
    hessian = torch.eye(32)
    hessian[3, 3] = value
    with pytest.raises(gptq.SingularHessian):
        gptq.quantize(drawn(4, 32), hessian, Grid(4, 32))


def test_awq_scales_up_weights_of_large_inputs() -> None:
    weight, x, grid = drawn(32, 128), drawn(500, 128, seed=1), Grid(4, 32)
    x[:, ::16] *= 30
    inputs = heard(x)
    s = awq.search_scale([weight], inputs, grid, lambda s: s)
    assert s[::16].mean() > 1.5 * s[1::16].mean()
    plain = outputs_off(x, dequantize(quantize_rtn(weight, grid), x.dtype), weight)
    scaled = outputs_off(x, dequantize(quantize_rtn(weight * s, grid), x.dtype) / s, weight)
    inputs.divide(s)
    clipped = outputs_off(x, dequantize(awq.quantize(weight * s, inputs, grid), x.dtype) / s, weight)
    assert clipped <= scaled < 0.7 * plain


def test_awq_leaves_optimal_weights_unscaled() -> None:
    s = awq.search_scale([drawn(16, 64)], heard(drawn(400, 64, seed=1)), Grid(4, 32), torch.ones_like)
    assert torch.equal(s, torch.ones(64))


def test_smoothing_helps_where_inputs_have_outliers() -> None:
    weight, x, grid = drawn(64, 128), drawn(500, 128, seed=1), Grid(8, None)
    x[:, 5] *= 100

    def off(s: Tensor) -> float:
        rounded = dequantize(quantize_rtn(weight * s, grid), torch.float32)
        return (smoothquant.fake_quantize_tokens(x / s) @ rounded.T - x @ weight.T).square().sum().item()

    s = smoothquant.search_scale([weight], heard(x), grid, lambda s: s)
    formula = x.abs().amax(0) ** 0.5 / weight.abs().amax(0) ** 0.5
    assert off(s) <= off(formula) * 1.0001
    assert off(s) < 0.1 * off(torch.ones(128))


def test_inputs_by_token_are_rounded_as_int8_rows_are() -> None:
    x = correlated(20, 64)
    expected = dequantize(quantize_int8(x, torch.float32), torch.float32)
    torch.testing.assert_close(smoothquant.fake_quantize_tokens(x), expected)
    assert torch.equal(smoothquant.fake_quantize_tokens(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_statistics_are_those_of_all_inputs_in_bounded_memory() -> None:
    x = correlated(3000, 16)
    inputs = InputStatistics(16, 30, hessian=True)
    for window in x.split(100):
        inputs.add(window)
    torch.testing.assert_close(inputs.mean_magnitude, x.abs().mean(0))
    torch.testing.assert_close(inputs.max_magnitude, x.abs().amax(0))
    assert inputs.hessian is not None
    torch.testing.assert_close(inputs.hessian, x.T @ x, rtol=1e-4, atol=1e-2)
    assert 900 < len(inputs.samples) <= MAX_SAMPLES
    s = torch.rand(16) + 0.5
    inputs.divide(s)
    y = x / s
    torch.testing.assert_close(inputs.mean_magnitude, y.abs().mean(0))
    torch.testing.assert_close(inputs.hessian, y.T @ y, rtol=1e-4, atol=1e-2)

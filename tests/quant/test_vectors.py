"""Vectors of 8-bit values with one scale each are within half a step of the original."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from localllm.quant.vectors import DTYPE_MAX, KV_DTYPES, dequantize_vectors, quantize_vectors, to_float32

E4M3 = torch.float8_e4m3fn
SMALLEST = 2.0**-9  # step of e4m3 near zero; above, steps are an eighth of the power of two below


def half_steps(x: torch.Tensor, scale: torch.Tensor, form: torch.dtype) -> torch.Tensor:
    """Largest rounding error, plus a thousandth for intermediate rounding in float32."""
    scale = scale.double()[..., None]
    if form == torch.int8:
        return scale * 0.5005
    binade = torch.exp2(torch.floor(torch.log2((x.double() / scale).abs().clamp(min=2**-6))))
    return scale * (binade / 8).clamp(min=SMALLEST) * 0.5005


@pytest.mark.parametrize("form", KV_DTYPES.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(0, 2**31), st.integers(1, 80), st.floats(-33, 37))
@example(333488, 1, -33.0)  # the scale is the smallest normal number
def test_values_are_within_half_a_step(
    form: torch.dtype, dtype: torch.dtype, seed: int, dim: int, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(6, 3, dim, generator=generator) * 10**magnitude).to(dtype)
    x = x.clamp(-3e38, 3e38)
    q, scale = quantize_vectors(x, form)
    assert (q.shape, q.dtype, scale.shape, scale.dtype) == (x.shape, form, x.shape[:-1], torch.bfloat16)
    read = dequantize_vectors(q, scale, torch.float64)
    assert ((read - x.double()).abs() <= half_steps(x, scale, form)).all()
    # The range of x is used but for the rounding to bfloat16 after a float32 division, down to normal scales.
    largest = x.double().abs().amax(-1).clamp(min=torch.finfo(torch.bfloat16).tiny * DTYPE_MAX[form])
    assert (scale.double() * DTYPE_MAX[form] <= largest * (1 + 2**-8) * (1 + 2**-23)).all()


@pytest.mark.parametrize("form", KV_DTYPES.values())
def test_zeros_stay_zeros(form: torch.dtype) -> None:
    assert (dequantize_vectors(*quantize_vectors(torch.zeros(2, 5), form), torch.float32) == 0).all()
    assert (dequantize_vectors(*quantize_vectors(torch.full((5,), 1e-43), form), torch.float32) <= 2e-38).all()


@pytest.mark.parametrize("form", KV_DTYPES.values())
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_non_finite(form: torch.dtype, wrong: float) -> None:
    x = torch.ones(2, 4)
    x[0, 2] = wrong
    for dtype in (torch.float32, torch.bfloat16):
        read = dequantize_vectors(*quantize_vectors(x, form), dtype)
        assert not read[0].isfinite().any()
        assert (read[1].float() - 1).abs().max() < 0.01


def test_every_e4m3_is_widened_as_torch_does() -> None:
    every = torch.arange(256).to(torch.uint8).view(E4M3)
    every = every[~every.float().isnan()]
    assert torch.equal(to_float32(every), every.float())


@pytest.mark.parametrize("form", KV_DTYPES.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_reading_rounds_once(form: torch.dtype, dtype: torch.dtype) -> None:
    q, scale = quantize_vectors(torch.randn(50, 16), form)
    assert torch.equal(
        dequantize_vectors(q, scale, dtype), (q.float().double() * scale.double()[:, None]).to(dtype)
    )

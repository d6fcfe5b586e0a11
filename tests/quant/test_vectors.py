"""Vectors of 8-bit values with one scale each, and of 4-bit values with an offset, are within half a step."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from localllm.quant.vectors import (
    DTYPE_MAX,
    EIGHT_BIT_DTYPES,
    INT4,
    dequantize_vectors,
    quantize_vectors,
    rotate_vectors,
    rotation_size,
    to_float32,
    unpack_int4,
)

E4M3 = torch.float8_e4m3fn
SMALLEST = 2.0**-9  # step of e4m3 near zero; above, steps are an eighth of the power of two below


def half_steps(x: torch.Tensor, scale: torch.Tensor, form: torch.dtype) -> torch.Tensor:
    """Largest rounding error, plus a thousandth for intermediate rounding in float32."""
    scale = scale.double()[..., None]
    if form == torch.int8:
        return scale * 0.5005
    binade = torch.exp2(torch.floor(torch.log2((x.double() / scale).abs().clamp(min=2**-6))))
    return scale * (binade / 8).clamp(min=SMALLEST) * 0.5005


@pytest.mark.parametrize("form", EIGHT_BIT_DTYPES.values())
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


@pytest.mark.parametrize("form", [*EIGHT_BIT_DTYPES.values(), INT4])
def test_zeros_stay_zeros(form: torch.dtype) -> None:
    assert (dequantize_vectors(*quantize_vectors(torch.zeros(2, 6), form), torch.float32) == 0).all()
    assert (dequantize_vectors(*quantize_vectors(torch.full((6,), 1e-43), form), torch.float32) <= 2e-38).all()


@pytest.mark.parametrize("form", [*EIGHT_BIT_DTYPES.values(), INT4])
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


@pytest.mark.parametrize("form", EIGHT_BIT_DTYPES.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_reading_rounds_once(form: torch.dtype, dtype: torch.dtype) -> None:
    q, scale = quantize_vectors(torch.randn(50, 16), form)
    assert torch.equal(
        dequantize_vectors(q, scale, dtype), (q.float().double() * scale.double()[:, None]).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(-33, 37), st.floats(-100, 100))
@example(0, 1, 37.0, 0.0)
def test_four_bits_are_within_half_a_step_and_the_rounding_of_the_offset(
    dtype: torch.dtype, seed: int, pairs: int, magnitude: float, centre: float
) -> None:
    x = torch.randn(6, 3, 2 * pairs, generator=torch.Generator().manual_seed(seed))
    x = ((x + centre) * 10**magnitude).to(dtype).clamp(-3e38, 3e38)
    q, scale = quantize_vectors(x, INT4)
    assert (q.shape, q.dtype, scale.shape, scale.dtype) == ((6, 3, pairs), INT4, (6, 3, 2), torch.bfloat16)
    step, offset = scale.double().unbind(-1)
    assert torch.equal(
        dequantize_vectors(q, scale, torch.float64),
        unpack_int4(q, torch.float64) * step[..., None] + offset[..., None],
    )
    error = (dequantize_vectors(q, scale, torch.float64) - x.double()).abs().amax(-1)
    largest = x.double().abs().amax(-1)
    assert (error <= 0.5005 * step + largest * 2**-8).all()
    spread = x.double().amax(-1) - x.double().amin(-1)
    assert (step <= (spread / 15).clamp(min=torch.finfo(torch.bfloat16).tiny) * (1 + 2**-8) * (1 + 2**-22)).all()


def test_two_codes_are_in_a_byte_the_first_in_its_lower_half() -> None:
    q, scale = quantize_vectors(torch.tensor([-8.0, 7.0, 0.0, -1.0]), INT4)
    assert q.tolist() == [0x78, 0xF0] and scale.tolist() == [1.0, 0.0]


def test_reading_four_bits_rounds_once() -> None:
    q, scale = quantize_vectors(torch.randn(50, 16) + 1, INT4)
    exact = dequantize_vectors(q, scale, torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantize_vectors(q, scale, dtype), exact.to(dtype))


@pytest.mark.parametrize("dim", [2, 10, 16, 80, 96, 128])
def test_rotation_is_the_hadamard_matrix_of_each_part(dim: int) -> None:
    size = rotation_size(dim)
    assert dim % size == 0 and dim // size % 2 == 1
    i = torch.arange(size)
    odd = (
        sum(i[:, None].bitwise_and(i) >> bit & 1 for bit in range(8)) % 2
    )  # whether i and j share an odd number of bits
    matrix = torch.block_diag(*[(1.0 - 2 * odd) / size**0.5] * (dim // size))
    x = torch.randn(3, 2, dim)
    torch.testing.assert_close(rotate_vectors(x, size), x @ matrix)
    torch.testing.assert_close(rotate_vectors(rotate_vectors(x, size), size), x)


def test_rotation_spares_four_bits_an_outlier() -> None:
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 30

    def error(y: torch.Tensor) -> float:
        return float((dequantize_vectors(*quantize_vectors(y, INT4), torch.float32) - y).square().mean())

    assert error(rotate_vectors(x, 64)) < error(x) / 8

"""Angles of positions under Triton's interpreter, against float64."""

import pytest
import torch

from localllm.runtime.kernels.registry import KERNELS

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("half", [64, 5])
def test_angles_are_exact_at_any_position(half: int) -> None:
    positions = torch.tensor([0, 1, 2, 1000, 131071, 999_983, 2**24 - 1])
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    cos, sin = KERNELS["angles"][0].run(positions, frequencies, 1.25)
    angle = (positions[:, None, None] * frequencies).double()  # rounded to float32, as models were trained
    assert cos.shape == sin.shape == (len(positions), 1, half)
    ulp = torch.finfo(torch.float32).eps
    assert (cos - 1.25 * angle.cos()).abs().max() < 1.25 * ulp
    assert (sin - 1.25 * angle.sin()).abs().max() < 1.25 * ulp


def test_they_are_those_of_the_reference() -> None:
    positions, frequencies = torch.arange(3, 40_000, 997), torch.rand(32)
    got, expected = (kernel.run(positions, frequencies, 1.0) for kernel in KERNELS["angles"])
    torch.testing.assert_close(got, expected, atol=2e-7, rtol=0)

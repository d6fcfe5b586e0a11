"""RMSNorm against its formula in float64."""

import pytest
import torch

from localllm.runtime.kernels import rms_norm
from localllm.runtime.kernels.cpu.elementwise import supports_rms_norm


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

"""Products whose activations are quantized, too, on the packed INT8 layout, under the interpreter."""

from dataclasses import replace

import pytest
import torch

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.gpu_packed import repack
from localllm.quant.packing import W8A8, W8A8_GPU_PACKED
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels import linear, prepare_weights
from localllm.runtime.kernels.gpu import dequantize as unpacking
from localllm.runtime.kernels.linear import linear_w8a8_reference
from localllm.runtime.kernels.registry import explain
from tests.quant.formats.test_interleaved import integers

pytestmark = pytest.mark.usefixtures("interpreter")
ROWS = (1, 16, 17, 60, 130)  # of x: one case or more of each way
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def stored(rows: int, columns: int) -> QuantizedTensor:
    return replace(integers("int8", rows, columns, None), format=W8A8)


def random_rows(count: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def test_weights_are_packed_when_they_are_loaded() -> None:
    weights = stored(48, 72), stored(37, 72)
    [packed] = prepare_weights(*weights, dtype=torch.bfloat16)
    assert isinstance(packed, QuantizedTensor) and packed.format == W8A8_GPU_PACKED
    assert packed.parts["q"].dtype == torch.int16  # planes
    expected = torch.cat([dequantize(weight, torch.float32) for weight in weights])
    assert torch.equal(dequantize(packed, torch.float32), expected)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(37, 72), (80, 200)])
@pytest.mark.parametrize("count", ROWS)
def test_products_are_those_of_the_reference(count: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    weight, x = stored(rows, columns), random_rows(count, columns, dtype)
    bias = random_rows(1, rows, dtype)[0]
    packed = repack(weight)
    assert packed
    assert explain("linear", x, packed, bias)[0][0] in ("triton-w8a8", "triton-skinny-planes")
    chosen = next(name for name, reason in explain("linear", x, packed, bias) if reason == "ok")
    assert chosen == "triton-w8a8"
    expected = linear_w8a8_reference(x, weight, bias)
    found = linear(x, packed, bias)
    assert found.dtype == dtype and found.shape == expected.shape
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=2 * eps * float(expected.abs().max()))
    if count >= unpacking.MIN_DEQUANTIZE_ROWS:
        assert torch.equal(found, expected)  # sums of integers


def test_a_scratch_buffer_that_holds_a_part_of_the_weight_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = stored(80, 200), random_rows(130, 200, torch.bfloat16)
    monkeypatch.setattr(unpacking, "SCRATCH_ELEMENTS", 32 * 200)
    packed = repack(weight)
    assert packed and unpacking.scratch_rows(packed) < 80
    assert torch.equal(linear(x, packed), linear_w8a8_reference(x, weight, None))


def test_the_reference_quantizes_activations_of_packed_weights_too() -> None:
    weight, x = stored(37, 72), random_rows(3, 72, torch.float32)
    packed = repack(weight)
    assert packed
    expected = linear_w8a8_reference(x, weight, None)
    torch.testing.assert_close(linear_w8a8_reference(x, packed, None), expected, rtol=1e-5, atol=1e-3)
    assert not torch.allclose(x @ dequantize(weight, torch.float32).T, expected, rtol=1e-5, atol=1e-3)

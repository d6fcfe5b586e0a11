"""Products of many rows with packed weights, under the interpreter, against `dequantize` and `F.linear`."""

import pytest
import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.gpu_packed import repack
from localllm.quant.packing import GGUF_GPU_PACKED
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels import linear, prepare_weights
from localllm.runtime.kernels.gpu import dequantize as unpacking
from localllm.runtime.kernels.gpu import quantized_gemm
from tests.quant.formats.test_gpu_packed import floats
from tests.quant.formats.test_interleaved import blocks, integers
from tests.runtime.kernels.harness import check_on_gpu

pytestmark = pytest.mark.usefixtures("interpreter")


def laid(weight: QuantizedTensor) -> QuantizedTensor:
    found = repack(weight)
    assert found
    return found


def rows_of(count: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, columns, generator=generator, dtype=torch.float64).bfloat16()


WEIGHTS = {
    "int4 32": lambda: integers("int4", 37, 160, 32),
    "int4 128, zeros": lambda: integers("int4", 80, 200, 128, zeros=True),
    "int4 of a row": lambda: integers("int4", 5, 72, None),
    "int8 of a row": lambda: integers("int8", 70, 72, None),
    "int8 16, zeros": lambda: integers("int8", 17, 48, 16, zeros=True),
    "mxfp4": lambda: floats("mxfp4", 33, 96, None),
    "fp8": lambda: floats("fp8", 33, 96, None),
    "fp8 64": lambda: floats("fp8", 16, 160, 64),
    **{form: (lambda form=form: blocks(form, 18, 256)) for form in GGUF_GPU_PACKED},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_format_is_multiplied(name: str) -> None:
    weight = laid(WEIGHTS[name]())
    x, bias = rows_of(19, weight.shape[1]), rows_of(1, weight.shape[0])[0]
    ran = check_on_gpu("linear", lambda dtype: (x.to(dtype), weight, bias.to(dtype)), torch.bfloat16)
    assert "triton-gemm" in ran and "triton-dequantized" not in ran


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_format_is_unpacked_as_it_is(name: str) -> None:
    weight = laid(WEIGHTS[name]())
    rows, columns = weight.shape
    for dtype in (torch.float32, torch.float16):
        w = torch.full((rows + 1, columns), torch.nan, dtype=dtype)
        unpacking.dequantize_rows(weight, 0, w[:rows])
        assert torch.equal(w[:rows], dequantize(weight, dtype))
        assert w[rows].isnan().all()


def test_columns_shared_out_are_added_up() -> None:
    weight, x = laid(integers("int8", 5, 2100, None)), rows_of(17, 2100)
    assert quantized_gemm.split_k(weight, x.device) == 2
    residual = rows_of(17, 5).float()
    found = quantized_gemm.quantized_gemm(x.float(), weight, torch.ones(5), residual)
    expected = torch.nn.functional.linear(x.double(), dequantize(weight, torch.float64)) + 1 + residual
    torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-5)


def test_a_residual_is_added_in_the_product() -> None:
    weight, x, residual = laid(integers("int4", 37, 64, 32)), rows_of(18, 64), rows_of(18, 37)

    def arguments(dtype: torch.dtype) -> tuple[object, ...]:
        return x.to(dtype), (weight,), None, None, None, residual.to(dtype)

    assert check_on_gpu("fused_linear", arguments, torch.float32) == ["triton-gemm"]


@pytest.mark.parametrize("tokens", [2, 3, 19, 100])
def test_a_row_does_not_depend_on_the_others(tokens: int) -> None:
    weight, x = laid(floats("mxfp4", 33, 96, None)), rows_of(100, 96)
    assert torch.equal(linear(x[:tokens], weight, None), linear(x, weight, None)[:tokens])


@pytest.mark.parametrize("most", [2**26, 20 * 256])
def test_many_rows_meet_a_weight_that_is_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(unpacking, "SCRATCH_ELEMENTS", most)
    weight, x, bias = laid(blocks("q6_k", 70, 256)), rows_of(128, 256), rows_of(1, 70)[0]
    ran = check_on_gpu("linear", lambda dtype: (x.to(dtype), weight, bias.to(dtype)), torch.float32)
    assert ran == ["triton-dequantized"]


def test_columns_in_an_order_of_their_own() -> None:
    weight = integers("int4", 20, 64, 32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = laid(QuantizedTensor("int4", weight.shape, weight.parts | {"columns": order}, 32))
    for tokens in (17, 128):
        x = rows_of(tokens, 64)
        assert check_on_gpu("linear", lambda dtype, x=x: (x.to(dtype), moved, None), torch.float32)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (2, 10, 64)])
def test_x_of_any_dimensions(shape: tuple[int, ...]) -> None:
    weight, x = laid(integers("int8", 20, 64, None)), torch.randn(shape)
    expected = torch.nn.functional.linear(x, dequantize(weight, torch.float32))
    torch.testing.assert_close(linear(x, weight, None), expected, rtol=1e-5, atol=1e-2)


def test_a_weight_is_laid_out_when_it_is_loaded() -> None:
    [stacked] = prepare_weights(blocks("q4_k", 16, 256), blocks("q4_k", 5, 256), dtype=torch.float32)
    assert isinstance(stacked, QuantizedTensor) and (stacked.format, stacked.shape) == ("int4_planes", (21, 256))
    apart = prepare_weights(blocks("q4_k", 16, 256), blocks("q6_k", 5, 256), dtype=torch.float32)
    assert [weight.format for weight in apart if isinstance(weight, QuantizedTensor)] == [
        "int4_planes",
        "int8_planes",
    ]
    [plain] = prepare_weights(blocks("f16", 16, 256), dtype=torch.float32)
    assert isinstance(plain, Tensor) and plain.dtype == torch.float32

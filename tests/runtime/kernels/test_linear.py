import pytest
import torch

from localllm.quant.formats import gguf
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.formats.groups import dequantize_bytes, quantize_int8
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels import explain, linear, prepare_weights
from localllm.runtime.kernels.cpu import quantized_matmul
from localllm.runtime.kernels.registry import KERNELS
from tests.runtime.kernels.harness import COMPILED, check, needs_compiled


def quantized(rows: int, columns: int) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64).bfloat16()
    return quantize_int8(weight, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [
        (1, 96, 64),
        (3, 100, 96),
        (17, 33, 32),
        (64, 64, 128),
        (65, 64, 128),
        (200, 64, 128),
        (2, 7, 50),
        (1, 5, 4100),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_int8(tokens: int, rows: int, columns: int, dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64).bfloat16()
    b = torch.randn(rows, generator=generator, dtype=torch.float64).bfloat16() if bias else None
    [weight] = prepare_weights(quantized(rows, columns))
    assert isinstance(weight, QuantizedTensor)
    ran = check("linear", lambda d: (x.to(d), weight, None if b is None else b.to(d)), dtype)
    integers = COMPILED and (tokens <= 64 or quantized_matmul.integers_are_faster(weight, dtype))
    assert ran == (["cpu-interleaved"] if integers else []) + ["cpu-interleaved-dequantized"] * COMPILED


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [64, 99])
@pytest.mark.parametrize("rows", [1, 7, 16, 1030])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6, 16, 17, 65])
def test_weights_of_16_bits_are_widened(tokens: int, rows: int, columns: int, narrow: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator)
    stored = torch.randn(rows, columns, generator=generator).to(narrow)
    bias = torch.randn(rows, generator=generator)

    def make(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return x.to(dtype), stored if dtype == torch.float32 else stored.to(dtype), bias.to(dtype)

    ran = check("plain_linear", make, torch.float32, terms=columns)
    assert ran == ["cpu-rows"] * (COMPILED and tokens <= 16) + ["cpu-widened"]


@needs_compiled
def test_widened_rows_have_the_bits_that_they_have_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 99, generator=generator), torch.randn(37, 99, generator=generator).bfloat16()
    together = linear(x, weight)
    for count in (1, 2, 3, 5):
        assert torch.equal(linear(x[:count], weight), together[:count])


@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 3, 32), (2, 0, 32), (5, 13, 32), (65, 1, 32)])
def test_x_of_any_dimensions(shape: tuple[int, ...]) -> None:
    stored = quantized(20, 32)
    [weight] = prepare_weights(stored)
    x, bias = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.ones(20)
    expected = torch.nn.functional.linear(x, dequantize_bytes(stored, torch.float32), bias)
    torch.testing.assert_close(linear(x, weight, bias), expected)
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)  # the same numbers, elsewhere in memory
    if COMPILED:  # torch's product of rows that are not side by side is another
        assert torch.equal(linear(turned, weight, bias), linear(x, weight, bias))
    torch.testing.assert_close(linear(turned, weight, bias), expected)


@pytest.mark.usefixtures("torch_alone")
def test_a_processor_without_the_instructions_keeps_what_it_is_given() -> None:
    weight = quantized(20, 32)
    assert prepare_weights(weight, weight) == (weight, weight)


@needs_compiled
def test_the_choice_is_explained() -> None:
    weight = quantized(8, 32)

    def told(x: torch.Tensor, weight: QuantizedTensor) -> dict[str, str]:
        return dict(explain("linear", x, weight, None))

    few, many = "cpu-interleaved", "cpu-interleaved-dequantized"
    stored = told(torch.zeros(1, 32), weight)
    assert (stored[few], stored[many], stored["reference"]) == ("the weight is int8", "the weight is int8", "ok")
    [laned] = prepare_weights(weight)
    assert isinstance(laned, QuantizedTensor)
    assert told(torch.zeros(65, 32), laned)[few].startswith("65 rows: dequantizing first")
    assert told(torch.zeros(1, 32).double(), laned)[many] == "x is float64"
    assert told(torch.zeros(1, 32, device="meta"), laned)[many] == "x is on meta"


def test_int8_is_within_half_a_step_of_the_weight() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[7] = 0
    packed = quantize_int8(weight, torch.float32)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((dequantize_bytes(packed, torch.float32) - weight).abs() <= step / 2 + 1e-6).all()
    assert packed.nbytes == 40 * 64 + 40 * 4


@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
def test_a_plain_weight_is_a_plain_product(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, w, bias = (
        torch.randint(-9, 10, shape, generator=generator).float() for shape in ((tokens, 3), (4, 3), (4,))
    )
    assert torch.equal(linear(x, w, bias), x @ w.T + bias)  # whole numbers: no order of their sums rounds
    x, w = (torch.randn(count, 99, generator=generator, dtype=torch.float64) for count in (tokens, 7))
    ran = check("plain_linear", lambda d: (x.to(d), w.to(d), None), torch.float32)
    assert ran == ["cpu-rows"] * (tokens <= 16 and COMPILED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["q4_k", "q6_k", "q8_0", "iq4_xs", "f16", "mxfp4_gguf"])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 33, 256), (1, 1100, 512), (5, 300, 1024)])
def test_blocks_of_gguf(tokens: int, rows: int, columns: int, form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    # Bytes below 60 make scales that are small and finite.
    packed = torch.randint(
        0, 60, (rows, BLOCK_TYPE_BY_NAME[form].row_bytes(columns)), generator=generator, dtype=torch.uint8
    )
    weight = QuantizedTensor(form, (rows, columns), {gguf.BLOCKS_PART: packed})
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64).to(dtype)
    assert "gguf-tiles" in check("linear", lambda d: (x.to(d), weight, None), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 96, 64), (3, 7, 50), (70, 33, 32)])
def test_products_of_8_bits_are_those_of_the_reference(
    tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    packed = quantized(rows, columns)
    weight = QuantizedTensor("w8a8", packed.shape, packed.parts)
    x = torch.randn(2, tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    kernels = {kernel.name: kernel for kernel in KERNELS["linear"]}
    assert explain("linear", x, weight, None)[[*kernels].index("cpu-w8a8")] == ("cpu-w8a8", "ok")
    found = kernels["cpu-w8a8"].run(x, weight, None)
    assert torch.equal(found, kernels["w8a8-reference"].run(x, weight, None))

"""Each layout of quantized weights, matrix by matrix, and the errors for inconsistent files."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from localllm.arch.layout import TensorLayout
from localllm.checkpoint.header import Header, gather_tensors
from localllm.checkpoint.layouts import read_quantization
from localllm.checkpoint.tensors import Weights
from localllm.errors import DamagedModel, UnsupportedModel
from localllm.quant.dequantize import dequantize
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels import linear
from localllm.runtime.weight_source import WeightSource
from tests.checkpoint import published
from tests.checkpoint.published import AWQ, GPTQ, LAYOUTS, PER_TOKEN, compressed, in_words
from tests.tiny import CPU

ROWS, COLUMNS = 24, 64


def load(tensors: dict[str, Tensor], quantization: Any, rows: int, columns: int) -> Tensor | QuantizedTensor:
    """Load the matrix from a file with these tensors."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({f"x.{name}": tensor.contiguous() for name, tensor in tensors.items()}, file)
        header = Header(
            file.parent,
            {"quantization_config": quantization},
            {},
            gather_tensors([file], TensorLayout()),
            TensorLayout(),
        )
        source = WeightSource(Weights(header), CPU, torch.float32)
        matrix = source.matrix("x", rows, columns)
        source.weights.finish()
        return matrix


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 150), seed=st.integers(0, 99))
def test_products_match_the_dequantized_weight(layout: str, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    if layout.startswith(("awq", "gptq")):  # what these layouts can hold
        rows, columns = 8 * rows, 8 * columns
    if layout == "awq":
        columns = -(-columns // 32) * 32
    writer, quantization = LAYOUTS[layout]
    tensors, exact = writer(torch.randn(rows, columns))
    matrix = load(tensors, quantization, rows, columns)
    x = torch.randn(3, columns)
    torch.testing.assert_close(linear(x, matrix), x @ exact.T, rtol=1e-4, atol=1e-4)
    if isinstance(matrix, QuantizedTensor):
        torch.testing.assert_close(dequantize(matrix, torch.float32), exact, rtol=1e-6, atol=0)
        half = torch.randperm(rows)[: rows // 2]
        assert torch.equal(
            dequantize(matrix.select_rows(half), torch.float32), dequantize(matrix, torch.float32)[half]
        )


def fields(words: Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08x}" for word in words.flatten().tolist()]


def test_words_are_those_of_the_published_layouts() -> None:
    eight = torch.arange(8)[None]
    assert fields(in_words(eight.numpy(), 4)) == ["76543210"]
    assert fields(in_words(eight.numpy(), 8)) == ["03020100", "07060504"]
    assert fields(in_words(eight.numpy(), 4, published.AWQ_ORDER)) == ["75316420"]
    assert fields(in_words((torch.full((1, 8), 8) - 1).numpy(), 4)) == ["77777777"]


def test_zero_points_of_version_1_are_read_as_they_were_written() -> None:
    """Zero points 0 and 5, minus 1 in the packed word, so that the first borrows from the second."""
    word = (0x50 - 0x11111111) & 0xFFFFFFFF
    qzeros = torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)
    tensors, _ = published.gptq(torch.ones(8, 32))
    matrix = load(tensors | {"qzeros": qzeros}, GPTQ | {"sym": False}, 8, 32)
    assert isinstance(matrix, QuantizedTensor)
    assert matrix.parts["zero"].flatten().tolist() == [0, 5, 0, 0, 0, 0, 0, 0]


Tensors = dict[str, Tensor]


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        flat = tensor.clone().flatten()
        flat[0] = value
        return flat.view(tensor.shape)

    return change


def nan_of(tensor: Tensor) -> Tensor:
    raw = tensor.view(torch.uint8).clone()
    raw[3, 4] = 0xFF
    return raw.view(torch.float8_e4m3fn)


NOT_STATED = "has zero points, but config.json says symmetric"


@pytest.mark.parametrize(
    ("layout", "edit", "words"),
    [
        ("awq", without("qzeros"), "lacks the tensor 'x.qzeros' (the runtime's name) of shape [2, 3]"),
        ("awq", without("scales"), "lacks the tensor 'x.scales'"),
        ("awq", changed("qweight", lambda q: q.T), "has shape [3, 64], but config.json implies [64, 3]"),
        ("awq", changed("scales", lambda s: s[:1]), "has shape [1, 24], but config.json implies [2, 24]"),
        ("awq", changed("scales", with_first(torch.nan)), "'x.scales' is NaN or infinite in 1 of 48 elements"),
        ("awq", lambda t: t | {"g_idx": torch.zeros(64, dtype=torch.int32)}, "the tensor 'x.g_idx'"),
        ("gptq", without("qzeros"), "lacks the tensor 'x.qzeros'"),
        ("gptq", changed("qzeros", with_first(5)), NOT_STATED),
        ("gptq", changed("g_idx", with_first(2)), "'x.g_idx' has the group 2, but there are 2"),
        ("gptq", changed("g_idx", with_first(-2)), "'x.g_idx' has the group -2"),
        ("gptq", changed("g_idx", with_first(1)), "'x.g_idx' has groups of sizes other than 32 columns"),
        ("gptq", changed("g_idx", lambda g: g[1:]), "'x.g_idx' has shape [63]"),
        ("gptq", changed("scales", with_first(torch.inf)), "'x.scales' is NaN or infinite"),
        ("gptq, 8 bits", changed("qweight", lambda q: q[::2]), "'x.qweight' has shape [8, 24]"),
        ("W4A16", without("weight_scale"), "lacks the tensor 'x.weight_scale'"),
        ("W4A16", changed("weight_shape", with_first(25)), "'x.weight_shape' is [25, 64]"),
        ("W4A16", changed("weight_scale", lambda s: s[:, :1]), "'x.weight_scale' has shape [24, 1]"),
        ("W4A16", changed("weight_scale", with_first(torch.nan)), "'x.weight_scale' is NaN or infinite"),
        ("W4A16, zero points", without("weight_zero_point"), "lacks the tensor 'x.weight_zero_point'"),
        ("W4A16, actorder", changed("weight_g_idx", with_first(9)), "has the group 9"),
        ("int-quantized", changed("weight_scale", lambda s: s[:-1]), "'x.weight_scale' has shape [23, 1]"),
        ("int-quantized", changed("weight_scale", with_first(torch.nan)), "'x.weight_scale' is NaN or infinite"),
        (
            "int-quantized",
            lambda t: t | {"weight_zero_point": torch.ones(24, 1, dtype=torch.int8)},
            NOT_STATED,
        ),
        (
            "int-quantized, groups, zero points",
            changed("weight_zero_point", lambda z: z[:, 0]),
            "'x.weight_zero_point' has shape [24]",
        ),
        ("float-quantized, rows", changed("weight", nan_of), "'x.weight' is NaN or infinite in 1 of 1536"),
        ("float-quantized, rows", changed("weight", lambda w: w[:-1]), "'x.weight' has shape [23, 64]"),
        ("fp8, blocks", changed("weight_scale_inv", lambda s: s[:, [0] * 3]), "_inv' has shape [1, 3]"),
        ("fp8, blocks", changed("weight_scale_inv", with_first(torch.inf)), "is NaN or infinite"),
        ("fp8, blocks", lambda t: t | {"input_scale": torch.ones(3)}, "'x.input_scale' has shape [3]"),
        ("fp8, blocks", changed("weight", lambda w: w.view(torch.int8)), "is stored as I8, which config.json"),
    ],
)
def test_invalid_tensors(layout: str, edit: Callable[[Tensors], Tensors], words: str) -> None:
    writer, quantization = LAYOUTS[layout]
    tensors, _ = writer(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(DamagedModel) as caught:
        load(edit(tensors), quantization, ROWS, COLUMNS)
    assert words in caught.value.message and caught.value.remedy


@pytest.mark.parametrize(
    ("layout", "scale"), [("awq", "scales"), ("W4A16", "weight_scale"), ("int-quantized", "weight_scale")]
)
def test_scales_in_a_dtype_that_no_kernel_reads(layout: str, scale: str) -> None:
    tensors, _ = LAYOUTS[layout][0](torch.randn(ROWS, COLUMNS))
    with pytest.raises(UnsupportedModel, match=rf"'x.{scale}' is stored as F64"):
        load(tensors | {scale: tensors[scale].double()}, LAYOUTS[layout][1], ROWS, COLUMNS)


def test_blocks_that_are_larger_than_any_weight() -> None:
    tensors, exact = published.float8(torch.randn(ROWS, COLUMNS), (ROWS, 32), "weight_scale_inv")
    matrix = load(tensors, {"quant_method": "fp8", "weight_block_size": [2**31 - 1, 32]}, ROWS, COLUMNS)
    assert isinstance(matrix, Tensor) and torch.equal(matrix, exact)


def test_scales_that_two_groups_of_columns_would_fit() -> None:
    tensors, _ = published.int_quantized(torch.randn(ROWS, COLUMNS), group=32)
    groups = {
        str(size): compressed("int-quantized", num_bits=8, group_size=size)["config_groups"]["group_0"]
        for size in (32, 48)
    }
    with pytest.raises(DamagedModel, match=r"matches several of config.json's groups"):
        load(tensors, compressed("int-quantized") | {"config_groups": groups}, ROWS, COLUMNS)


@pytest.mark.parametrize(
    ("layout", "quantization", "words"),
    [
        ("awq", GPTQ, "has shape"),
        ("awq", None, "there is a tensor 'x.qweight', but config.json does not say that weights are quantized"),
        ("awq", LAYOUTS["W4A16"][1], "config.json says that weights are stored as compressed-tensors"),
        ("awq", AWQ | {"group_size": 16}, "'x.scales' has shape [2, 24], but config.json implies [4, 24]"),
        ("awq", AWQ | {"zero_point": False}, NOT_STATED),
        ("gptq", GPTQ | {"bits": 8}, "'x.qweight' has shape [8, 24], but config.json implies [16, 24]"),
        ("gptq", GPTQ | {"checkpoint_format": "gptq_v2"}, NOT_STATED),
        ("W4A16", compressed("pack-quantized", num_bits=8, group_size=32), "'x.weight_packed' has shape [24, 8]"),
        ("W4A16", GPTQ, "there is a tensor 'x.weight_packed'"),
        ("fp8, blocks", {"quant_method": "fp8"}, "'x.weight_scale_inv' has shape [1, 2]"),
        ("int-quantized", {"quant_method": "mxfp4"}, "there is a tensor 'x.weight', but config.json says"),
    ],
)
def test_a_config_that_contradicts_the_tensors(layout: str, quantization: Any, words: str) -> None:
    tensors, _ = LAYOUTS[layout][0](torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(DamagedModel) as caught:
        load(tensors, quantization, ROWS, COLUMNS)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        (24, 48, "has 48 columns, but its layout needs a multiple of 32"),
        (20, 64, "has 20 rows, but its layout"),
    ],
)
def test_what_awq_cannot_hold(rows: int, columns: int, words: str) -> None:
    tensors, _ = published.awq(torch.randn(24, 64))
    with pytest.raises(DamagedModel, match=words):
        load(tensors, AWQ, rows, columns)


def test_a_scale_as_a_power_of_two() -> None:
    scale = torch.tensor([[0.25, 2.0]])
    q = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    tensors = {"weight": q, "weight_scale_inv": scale.to(torch.float8_e8m0fnu)}
    exact = q.float() * scale.repeat_interleave(40, 1)[:, :COLUMNS]
    matrix = load(tensors, LAYOUTS["fp8, blocks"][1], ROWS, COLUMNS)
    assert isinstance(matrix, Tensor) and torch.equal(matrix, exact)


def test_eight_bit_products_are_exact_integer_products() -> None:
    tensors, _ = published.int_quantized(torch.randn(33, 50))
    matrix = load(tensors, published.W8A8[1], 33, 50)
    x = torch.randn(4, 50)
    x[2] = 0
    x_scale = x.abs().amax(1, keepdim=True) / 127
    codes = torch.nan_to_num(x / x_scale).round().long()
    expected = (codes @ tensors["weight"].long().T).double() * x_scale * tensors["weight_scale"][:, 0]
    torch.testing.assert_close(linear(x, matrix), expected.float(), rtol=1e-5, atol=1e-6)


CHANNEL = {"num_bits": 8, "strategy": "channel"}


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (AWQ | {"version": "gemv"}, "in the layout 'gemv'"),
        (AWQ | {"bits": 8}, "in 8 bits"),
        (GPTQ | {"bits": 3}, "in 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "in the layout 'marlin'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported"),
        (compressed("int-quantized", PER_TOKEN | {"dynamic": False}, **CHANNEL), "static scales of activations"),
        (compressed("int-quantized", PER_TOKEN | {"strategy": "tensor"}, **CHANNEL), "with these activations"),
        (compressed("int-quantized", PER_TOKEN | {"symmetric": False}, **CHANNEL), "with these activations"),
        (compressed("pack-quantized", PER_TOKEN, num_bits=4, group_size=32), "with these activations"),
        (compressed("int-quantized", PER_TOKEN, num_bits=8, group_size=32), "with groups or zero points"),
        (compressed("marlin-24", num_bits=4, group_size=32), "'compressed-tensors marlin-24' of 4 bits"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), "of 4 bits"),
        (compressed("pack-quantized", num_bits=3, group_size=32), "of 3 bits"),
        (compressed("pack-quantized", num_bits=4, group_size=32) | {"transform_config": {"a": 1}}, "transforms"),
        (compressed("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "marlin-24"}}, "sparse"),
        (compressed("pack-quantized", num_bits=4) | {"config_groups": {}}, "without config_groups"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "with experts in fp4"),
    ],
)
def test_what_does_not_run_is_refused_with_the_reason(quantization: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_quantization({"quantization_config": quantization})
    assert words in caught.value.message and caught.value.remedy


@pytest.mark.parametrize(
    "quantization",
    [
        GPTQ | {"bits": "4"},
        GPTQ | {"group_size": 0},
        GPTQ | {"dynamic": [1]},
        AWQ | {"zero_point": 1},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 1]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": ["Linear"]}},
        compressed("float-quantized", type="float", strategy="block", block_structure="128xx"),
        compressed("pack-quantized", num_bits=4, strategy="group"),
    ],
    ids=range(9),
)
def test_nonsense_is_reported_as_damage(quantization: dict[str, Any]) -> None:
    with pytest.raises(DamagedModel):
        read_quantization({"quantization_config": quantization})

"""Weights in packed GPU layout equal the original weights bit by bit."""

import pytest
import torch

from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gpu_packed as gpu_packed
from localllm.quant.formats.gpu_packed import TILE_ROWS, repack
from localllm.quant.packing import GGUF_GPU_PACKED, gguf_gpu_packed_bytes
from localllm.quant.tensor import QuantizedTensor
from tests.quant.formats.test_interleaved import blocks, integers

SIZES = [(16, 256), (37, 512), (1, 768)]


def floats(form: str, rows: int, columns: int, group: int | None) -> QuantizedTensor:
    """Every code except those that are NaN."""
    generator = torch.Generator().manual_seed(columns)
    if form == "mxfp4":
        q = torch.randint(0, 256, (rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scale = torch.randint(100, 140, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        scale[:, 0] = 1
        return QuantizedTensor("mxfp4", (rows, columns), {"q": q, "scale": scale})
    codes = torch.randint(-128, 127, (rows, columns), generator=generator).to(torch.int8)
    q = torch.where(codes == -1, 0, codes).view(torch.float8_e4m3fn)  # -1, all bits set, is NaN
    scale = torch.rand(rows, -(-columns // (group or columns)), generator=generator)
    return QuantizedTensor("fp8", (rows, columns), {"q": q, "scale": scale}, group)


def same(laid: QuantizedTensor | None, *weights: QuantizedTensor) -> bool:
    assert laid
    expected = torch.cat([dequantize(weight, torch.float32) for weight in weights])
    return torch.equal(dequantize(laid, torch.float32), expected)


@pytest.mark.parametrize("form", GGUF_GPU_PACKED)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_blocks_of_gguf(form: str, rows: int, columns: int) -> None:
    weight = blocks(form, rows, columns)
    laid = repack(weight)
    assert same(laid, weight)
    assert laid and laid.nbytes == gguf_gpu_packed_bytes(form, rows, columns)


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("group", [None, 16, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (37, 515), (5, 40), (1, 896)])
def test_integer_weights(form: str, group: int | None, zeros: bool, rows: int, columns: int) -> None:
    weight = integers(form, rows, columns, group, zeros=zeros)
    assert same(repack(weight), weight)


@pytest.mark.parametrize(("form", "group"), [("mxfp4", 32), ("fp8", None), ("fp8", 128)])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (37, 96), (5, 2880)])
def test_floats(form: str, group: int | None, rows: int, columns: int) -> None:
    weight = floats(form, rows, columns, group)
    assert same(repack(weight), weight)


def test_weights_of_one_format_are_fused() -> None:
    for make in (lambda rows: integers("int4", rows, 64, 32), lambda rows: blocks("q4_k", rows, 256)):
        weights = [make(rows) for rows in (16, 48, 5)]
        assert same(repack(*weights), *weights)


def test_incompatible_weights_stay_separate() -> None:
    assert repack(blocks("q4_k", 16, 256), blocks("q6_k", 16, 256)) is None
    assert repack(blocks("q4_k", 5, 256), blocks("q4_k", 16, 256)) is None
    grouped = [integers("int4", 16, 256, group, zeros=True) for group in (64, 32)]
    assert repack(*grouped) is None


@pytest.mark.parametrize("group", [4, 7, 24])
def test_groups_that_no_plane_lies_in_stay_as_they_are(group: int) -> None:
    assert repack(integers("int8", 4, 64, group)) is None


def test_columns_in_another_order() -> None:
    weight = integers("int4", 16, 64, 32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = QuantizedTensor("int4", weight.shape, weight.parts | {"columns": order}, 32)
    assert same(repack(moved), moved)
    assert repack(moved, weight) is None


def test_large_weights_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_packed, "CHUNK_ELEMENTS", 8192)
    weights, seen = [blocks("q5_k", rows, 256) for rows in (160, 37)], []
    laid = repack(*weights, on_read=lambda: seen.append(1))
    assert same(laid, *weights) and len(seen) == 2


# Layout of planes in memory.


@pytest.mark.parametrize(("form", "bits"), [("int4", 4), ("int8", 8)])
def test_a_word_holds_the_same_column_of_each_plane(form: str, bits: int) -> None:
    weight = integers(form, 19, 600, 32)
    made = repack(weight)
    assert made and made.format == f"{form}_planes"
    q = made.parts["q"]
    words, planes = q.shape[3], 16 // bits
    codes = (dequantize(weight, torch.float32) / weight.parts["scale"].repeat_interleave(32, 1)[:, :600]).round()
    for row, column in [(0, 0), (18, 599), (7, 333), (16, 33)]:
        chunk, within = divmod(column, words * planes)
        word = int(q[row // TILE_ROWS, chunk, row % TILE_ROWS, within % words]) & 0xFFFF
        code = (word >> (within // words * bits)) & (2**bits - 1)
        assert (code - 8 if bits == 4 else (code ^ 128) - 128) == codes[row, column]

"""Interleaved weights equal the original weights bit by bit."""

import pytest
import torch

from localllm.quant.dequantize import dequantize, dequantize_rows
from localllm.quant.formats.gguf import BLOCKS_PART
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.formats.groups import pack_int4
from localllm.quant.formats.interleaved import interleave
from localllm.quant.packing import GGUF_INTERLEAVED_BYTES
from localllm.quant.tensor import QuantizedTensor

SIZES = [(16, 256), (37, 512), (1, 768)]


def blocks(form: str, rows: int, columns: int) -> QuantizedTensor:
    """Random bytes below 60, for small finite scales."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(
        0, 60, (rows, BLOCK_TYPE_BY_NAME[form].row_bytes(columns)), generator=generator, dtype=torch.uint8
    )
    return QuantizedTensor(form, (rows, columns), {BLOCKS_PART: packed})


def integers(form: str, rows: int, columns: int, group: int | None, *, zeros: bool = False) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(columns)
    groups = -(-columns // (group or columns))
    low, high = (0, 16) if form == "int4" else (-128, 128)
    codes = torch.randint(low, high, (rows, columns), generator=generator)
    q = pack_int4(codes.to(torch.uint8)) if form == "int4" else codes.to(torch.int8)
    parts = {"q": q, "scale": torch.rand(rows, groups, generator=generator)}
    if zeros:
        parts["zero"] = torch.randint(low, high, (rows, groups), generator=generator).to(q.dtype)
    return QuantizedTensor(form, (rows, columns), parts, group)


@pytest.mark.parametrize("form", GGUF_INTERLEAVED_BYTES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_blocks_of_gguf(form: str, rows: int, columns: int) -> None:
    weight = blocks(form, rows, columns)
    laned = interleave(weight)
    bits = 8 * GGUF_INTERLEAVED_BYTES[form] / BLOCK_TYPE_BY_NAME[form].block_elements
    assert laned and laned.format == f"int{4 if bits < 6 else 6 if bits < 8 else 8}_lanes"
    assert torch.equal(dequantize(laned, torch.float32), dequantize(weight, torch.float32))
    tiles = -(-rows // 16) * 16
    assert (
        laned.nbytes == tiles * columns // BLOCK_TYPE_BY_NAME[form].block_elements * GGUF_INTERLEAVED_BYTES[form]
    )


@pytest.mark.parametrize("form", [*GGUF_INTERLEAVED_BYTES, "int4", "int8"])
def test_single_rows_have_the_bits_of_all(form: str) -> None:
    weight = integers(form, 37, 515, 64, zeros=True) if form.startswith("int") else blocks(form, 37, 512)
    laned, index = interleave(weight), torch.tensor([36, 0, 15, 16, 16])
    assert laned
    assert torch.equal(dequantize_rows(laned, index, torch.bfloat16), dequantize(laned, torch.bfloat16)[index])


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("group", [None, 16, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (37, 515), (5, 40)])
def test_integer_weights(form: str, group: int | None, zeros: bool, rows: int, columns: int) -> None:
    weight = integers(form, rows, columns, group, zeros=zeros)
    laned = interleave(weight)
    assert laned
    assert torch.equal(dequantize(laned, torch.float32), dequantize(weight, torch.float32))


def test_columns_in_another_order() -> None:
    weight = integers("int4", 16, 64, 32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = QuantizedTensor("int4", weight.shape, weight.parts | {"columns": order}, 32)
    laned = interleave(moved)
    assert laned and torch.equal(dequantize(laned, torch.float32), dequantize(moved, torch.float32))


@pytest.mark.parametrize(("form", "group"), [("int4", 8), ("int4", 48), ("int8", 24), ("int8", 8)])
def test_groups_below_a_vector_are_not_interleaved(form: str, group: int) -> None:
    assert interleave(integers(form, 16, 96, group)) is None


def test_weights_of_one_format_are_fused() -> None:
    weights = [integers("int4", rows, 64, 32) for rows in (16, 48, 5)]
    whole = interleave(*weights)
    assert whole and whole.shape == (69, 64)
    assert torch.equal(
        dequantize(whole, torch.float32), torch.cat([dequantize(w, torch.float32) for w in weights])
    )


@pytest.mark.parametrize("other", [("int8", 16, 64, 32), ("int4", 16, 64, 64), ("int4", 16, 96, 32)])
def test_different_formats_stay_separate(other: tuple[str, int, int, int]) -> None:
    assert interleave(integers("int4", 16, 64, 32), integers(*other)) is None


def test_a_tile_that_is_not_full_ends_a_weight() -> None:
    assert interleave(integers("int4", 5, 64, 32), integers("int4", 16, 64, 32)) is None
    assert interleave(integers("int4", 16, 64, 32), integers("int4", 5, 64, 32))


def test_large_weights_are_packed_in_pieces() -> None:
    weight, seen = blocks("q8_0", 5000, 1024), []
    laned = interleave(weight, on_read=lambda: seen.append(1))
    assert laned and len(seen) == 3
    assert torch.equal(dequantize(laned, torch.float32), dequantize(weight, torch.float32))

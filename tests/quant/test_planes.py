"""Weights in planes are the weights that they were, bit by bit."""

import pytest
import torch

from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gguf
from localllm.quant.formats.planes import ROWS, joined, planes_of, to_planes
from localllm.quant.tensor import ORDER
from tests.quant.test_lanes import blocks, integers

SIZES = [(16, 256), (37, 515), (5, 40), (1, 896)]


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("group", [None, 16, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_whole_numbers(form: str, group: int | None, zeros: bool, rows: int, columns: int) -> None:
    weight = integers(form, rows, columns, group, zeros=zeros)
    made = to_planes(weight)
    assert made and made.format == f"{form}_planes"
    assert torch.equal(dequantize(made, torch.float32), dequantize(weight, torch.float32))


@pytest.mark.parametrize(("form", "bits"), [("int4", 4), ("int8", 8)])
def test_a_word_holds_the_same_column_of_each_plane(form: str, bits: int) -> None:
    weight = integers(form, 19, 600, 32)
    made = to_planes(weight)
    assert made
    q = made.parts["q"]
    words, planes = q.shape[3], 16 // bits
    codes = (dequantize(weight, torch.float32) / weight.parts["scale"].repeat_interleave(32, 1)[:, :600]).round()
    for row, column in [(0, 0), (18, 599), (7, 333), (16, 33)]:
        chunk, within = divmod(column, words * planes)
        word = int(q[row // ROWS, chunk, row % ROWS, within % words]) & 0xFFFF
        code = (word >> (within // words * bits)) & (2**bits - 1)
        assert (code - 8 if bits == 4 else (code ^ 128) - 128) == codes[row, column]


def test_columns_in_another_order() -> None:
    weight = integers("int4", 9, 128, 32)
    weight.parts[ORDER] = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    made = to_planes(weight)
    assert made
    assert torch.equal(dequantize(made, torch.float32), dequantize(weight, torch.float32))
    assert to_planes(weight, weight) is None


@pytest.mark.parametrize("form", ["q4_0", "q4_1", "q8_0", "q2_k", "q4_k", "q6_k"])
def test_blocks_of_gguf_lose_nothing(form: str) -> None:
    weight = blocks(form, 21, 512)
    rows = weight.parts[gguf.PART].unflatten(1, (-1, gguf.BY_NAME[form].block_bytes))
    apart = gguf.TAKE_APART[form](rows.flatten(0, 1))
    numbers = {"scale": apart.scale, "minimum": apart.minimum}
    if apart.factor is not None:
        numbers = {"scale": apart.factor, "minimum": apart.minimum_factor}
        numbers |= {"block_scale": apart.scale, "block_minimum": apart.minimum}
    parts = {name: part.reshape(21, -1) for name, part in numbers.items() if part is not None}
    codes, bits = apart.codes.reshape(21, -1), 4 if form[1] in "24" else 8
    made = planes_of(
        codes + 8 if form == "q4_0" else codes, codes.shape[1] // parts["scale"].shape[1], bits, **parts
    )
    assert torch.equal(dequantize(made, torch.float32), dequantize(weight, torch.float32))


def test_weights_that_x_meets_together_lie_one_below_the_other() -> None:
    weights = [integers("int4", rows, 256, 64, zeros=True) for rows in (32, 16, 5)]
    made = to_planes(*weights)
    assert made and made.shape == (53, 256)
    expected = torch.cat([dequantize(weight, torch.float32) for weight in weights])
    assert torch.equal(dequantize(made, torch.float32), expected)
    assert to_planes(*reversed(weights)) is None  # rows between them were filled up
    assert to_planes(weights[0], integers("int4", 16, 256, 32, zeros=True)) is None
    pieces = [planes for weight in weights if (planes := to_planes(weight))]
    again = joined(pieces)
    assert again and torch.equal(again.parts["q"], made.parts["q"])


@pytest.mark.parametrize("group", [4, 7, 24])
def test_groups_that_no_plane_lies_in_stay_as_they_are(group: int) -> None:
    assert to_planes(integers("int8", 4, 64, group)) is None


def test_a_weight_is_laid_in_pieces_as_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = integers("int8", 83, 128, 64)
    whole = to_planes(weight)
    monkeypatch.setattr("localllm.quant.formats.planes.WEIGHTS_AT_ONCE", 32 * 128)
    cut = to_planes(weight)
    assert whole and cut and cut.shape == whole.shape
    assert all(torch.equal(cut.parts[name], part) for name, part in whole.parts.items())

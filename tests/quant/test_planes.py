"""How planes lie in memory. Repacking keeps the weights: test_repack.py."""

import pytest
import torch

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.gpu_packed import TILE_ROWS, repack
from tests.quant.test_lanes import integers


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

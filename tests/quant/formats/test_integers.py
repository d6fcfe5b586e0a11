"""INT4 and INT8 against their definition, element by element."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.groups import pack_int4, unpack_int4
from localllm.quant.tensor import QuantizedTensor


@given(rows=st.integers(1, 9), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_codes_that_are_packed_come_out_as_they_were(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    assert torch.equal(unpack_int4(pack_int4(codes), columns), codes)


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("group", [None, 4, 7])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_weight_is_its_codes_less_the_zero_point_times_the_scale(
    form: str, group: int | None, zeros: bool, ordered: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = 3, 13
    groups = -(-columns // (group or columns))
    low, high = (0, 16) if form == "int4" else (-128, 128)
    codes = torch.randint(low, high, (rows, columns), generator=generator)
    zero = torch.randint(low, high, (rows, groups), generator=generator)
    scale = torch.rand(rows, groups, generator=generator)
    order = torch.randperm(columns, generator=generator) if ordered else torch.arange(columns)
    expected = torch.empty(rows, columns)
    for row in range(rows):
        for at in range(columns):
            g = at // (group or columns)
            middle = zero[row, g] if zeros else (8 if form == "int4" else 0)
            expected[row, order[at]] = (codes[row, at] - middle) * scale[row, g]
    stored = pack_int4(codes.to(torch.uint8)) if form == "int4" else codes.to(torch.int8)
    parts = {"q": stored, "scale": scale}
    if zeros:
        parts["zero"] = zero.to(stored.dtype)
    if ordered:
        parts["columns"] = order
    assert torch.equal(dequantize(QuantizedTensor(form, (rows, columns), parts, group), torch.float32), expected)

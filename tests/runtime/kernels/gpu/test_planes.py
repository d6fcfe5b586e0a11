"""Products of more than a few rows with weights in planes, under the interpreter: each beside `dequantize` and
`F.linear`, whatever the format."""

import pytest
import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.repack import repacked
from localllm.quant.packing import GGUF_PLANES
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.gpu import dequantize as unpacking
from tests.quant.test_lanes import blocks, integers
from tests.quant.test_repack import floats
from tests.runtime.kernels.harness import check

pytestmark = pytest.mark.usefixtures("interpreter")


def laid(weight: QuantizedTensor) -> QuantizedTensor:
    found = repacked(weight)
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
    **{form: (lambda form=form: blocks(form, 18, 256)) for form in GGUF_PLANES},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_format_is_multiplied(name: str) -> None:
    weight = laid(WEIGHTS[name]())
    x, bias = rows_of(19, weight.shape[1]), rows_of(1, weight.shape[0])[0]
    ran = check("linear", lambda dtype: (x.to(dtype), weight, bias.to(dtype)), torch.bfloat16)
    assert "triton-gemm" in ran and "triton-dequantized" not in ran


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_format_is_unpacked_as_it_is(name: str) -> None:
    weight = laid(WEIGHTS[name]())
    rows, columns = weight.shape
    for dtype in (torch.float32, torch.float16):
        w = torch.full((rows + 1, columns), torch.nan, dtype=dtype)
        unpacking.unpack_rows(weight, 0, w[:rows])
        assert torch.equal(w[:rows], dequantize(weight, dtype))
        assert w[rows].isnan().all()

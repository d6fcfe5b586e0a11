"""Products of few rows: right, and the same for a row whatever stands beside it."""

import pytest
import torch
from torch import Tensor

from localllm.quant.formats.planes import to_planes
from localllm.quant.tensor import QuantizedTensor
from tests.quant.test_lanes import integers
from tests.runtime.kernels.harness import check

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def planes(form: str, rows: int, columns: int, group: int | None, *, zeros: bool = False) -> QuantizedTensor:
    weight = integers(form, rows, columns, group, zeros=zeros)
    weight.parts["scale"] = (weight.parts["scale"] / 8).bfloat16()
    made = to_planes(weight)
    assert made
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "group", "zeros"),
    [
        ("int4", 128, False),
        ("int4", 64, True),
        ("int4", 32, True),
        ("int4", 16, False),
        ("int4", None, True),
        ("int8", None, False),
        ("int8", 128, True),
        ("int8", 32, False),
    ],
)
def test_packed_weights(form: str, group: int | None, zeros: bool, dtype: torch.dtype) -> None:
    weight = planes(form, 40, 300, group, zeros=zeros)
    x, bias = random(5, 300), random(40)
    ran = check("linear", lambda d: (x.to(d), weight, bias.to(d)), dtype)
    assert ran == ["triton-skinny-planes"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 33, 256), (2, 1, 77), (16, 70, 130)])
def test_plain_weights(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = random(tokens, columns), random(rows, columns)
    assert check("plain_linear", lambda d: (x.to(d), weight.to(d), None), dtype) == ["triton-skinny"]

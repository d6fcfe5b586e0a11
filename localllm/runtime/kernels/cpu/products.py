"""y = x W^T for W in lanes: the tensors that the programs are called with.

The result for a row of x does not depend on what other rows there are, within each of the two ways.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quant.packing import PANEL_ROWS, ROWS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import programs
from localllm.runtime.kernels.cpu.compile import Compiled, Once
from localllm.runtime.kernels.cpu.layout import PARTS, Layout

PLANES = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}
ROWS_AT_ONCE = 4  # of x
MOST_ROWS = 64  # of x; bfloat16, 8192 x 2048: 64 rows 6.4 ms so and 7.9 dequantized, 128 rows 12.7 and 8.5


@Once
def planes_program(kind: torch.dtype, group: int, planes: int) -> Compiled:
    return Compiled(lambda p: programs.write_planes(p, kind, group, planes), "planes", 6)


@Once
def product_program(layout: Layout, planes: int, rows: int, out: torch.dtype) -> Compiled:
    return Compiled(lambda p: programs.multiply(p, layout, planes, rows, out), "multiply", 6 + len(PARTS))


@Once
def numbers_program(layout: Layout, out: torch.dtype) -> Compiled:
    return Compiled(lambda p: programs.write_numbers(p, layout, out), "numbers", 4 + len(PARTS))


def compile_ahead(weight: QuantizedTensor, kind: torch.dtype) -> None:
    """All that will multiply rows of this dtype with the weight."""
    if kind not in PLANES:
        return
    layout, planes = Layout.of(weight), PLANES[kind]
    planes_program.ahead(kind, layout.group, planes)
    for rows in (ROWS_AT_ONCE, 1):
        product_program.ahead(layout, planes, rows, kind)
    numbers_program.ahead(layout, kind)


def few_rows(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]: W is read once for every 4 rows."""
    layout, x = Layout.of(weight), as_stored(x, weight)
    planes, count = PLANES[x.dtype], len(x)
    rows = 1 if count == 1 else ROWS_AT_ONCE
    room = -(-count // rows) * rows
    tiles, groups, _ = weight.parts["scale"].shape
    bytes_ = torch.empty(planes * room * x.shape[1], dtype=torch.int8)
    records = torch.empty(room * groups * programs.record_bytes(planes), dtype=torch.int8)
    y = torch.empty(room, tiles * ROWS, dtype=x.dtype)
    written = (bytes_.data_ptr(), records.data_ptr())
    planes_program(x.dtype, layout.group, planes).alone(x.data_ptr(), *written, count, room, groups)
    product_program(layout, planes, rows, x.dtype)(*written, y.data_ptr(), *addresses(weight), tiles, groups, room)
    return y[:count, : weight.shape[0]]


def many_rows(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]: some rows of W at a time are dequantized to the dtype of x."""
    layout, x = Layout.of(weight), as_stored(x, weight)
    tiles, groups, _ = weight.parts["scale"].shape
    width = PANEL_ROWS // ROWS  # tiles
    y = torch.empty(len(x), tiles * ROWS, dtype=x.dtype)
    program, parts = numbers_program(layout, x.dtype), addresses(weight)
    panel = torch.empty(x.shape[1] * min(width, tiles) * ROWS, dtype=x.dtype)
    for first in range(0, tiles, width):
        count = min(width, tiles - first)
        program(panel.data_ptr(), *parts, first, count, groups)
        some = panel[: x.shape[1] * count * ROWS].view(x.shape[1], -1)
        torch.mm(x, some, out=y[:, first * ROWS : (first + count) * ROWS])
    return y[:, : weight.shape[0]]


def as_stored(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x with its columns in the order of the weight's, filled up to whole groups."""
    assert x.shape[1] == weight.shape[1]  # the programs take the weight's word for it
    if "columns" in weight.parts:
        x = x[:, weight.parts["columns"]]
    assert weight.group is not None
    missing = weight.parts["scale"].shape[1] * weight.group - x.shape[1]
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def addresses(weight: QuantizedTensor) -> list[int]:
    return [weight.parts[name].data_ptr() if name in weight.parts else 0 for name in PARTS]

"""y = x W^T for W in lanes: the tensors that the programs are called with.

The result for a row of x does not depend on what other rows there are, within each of the two ways.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.hardware import processor
from localllm.quant.packing import INTERLEAVED_BITS, PANEL_ROWS, TILE_ROWS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import matmul_ir
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce
from localllm.runtime.kernels.cpu.layout import PART_NAMES, InterleavedLayout
from localllm.runtime.kernels.cpu.matmul_ir import SplitFormat

PLANES_BY_DTYPE = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}
BLOCK_ROWS = 4  # of x
MAX_ROWS = 64  # of x; bfloat16, 8192 x 2048: 64 rows 6.4 ms so and 7.9 dequantized, 128 rows 12.7 and 8.5


@CompileOnce
def compile_split(kind: torch.dtype, group: int, split: SplitFormat) -> CompiledKernel:
    return CompiledKernel(lambda p: matmul_ir.emit_split(p, kind, group, split), "split", 6)


@CompileOnce
def compile_matmul(layout: InterleavedLayout, split: SplitFormat, rows: int, out: torch.dtype) -> CompiledKernel:
    return CompiledKernel(
        lambda p: matmul_ir.emit_matmul(p, layout, split, rows, out), "multiply", 6 + len(PART_NAMES)
    )


def split_format(weight: QuantizedTensor, kind: torch.dtype) -> SplitFormat:
    """How x of this dtype is split for the weight."""
    planes = weight.activation_bits // 8 if weight.activation_bits else PLANES_BY_DTYPE[kind]
    return SplitFormat.of(processor.byte_product(processor.features()), INTERLEAVED_BITS[weight.format], planes)


@CompileOnce
def compile_dequantize(layout: InterleavedLayout, out: torch.dtype) -> CompiledKernel:
    return CompiledKernel(lambda p: matmul_ir.emit_dequantize(p, layout, out), "numbers", 4 + len(PART_NAMES))


def compile_ahead(weight: QuantizedTensor, kind: torch.dtype) -> None:
    """All that will multiply rows of this dtype with the weight."""
    if kind not in PLANES_BY_DTYPE:
        return
    layout = InterleavedLayout.from_weight(weight)
    split = split_format(weight, kind)
    compile_split.compile_ahead(kind, layout.group, split)
    for rows in (BLOCK_ROWS, 1):
        compile_matmul.compile_ahead(layout, split, rows, kind)
    compile_dequantize.compile_ahead(layout, kind)


def matmul_small_m(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]: W is read once for every 4 rows."""
    layout, x = InterleavedLayout.from_weight(weight), reorder_columns(x, weight)
    split, count = split_format(weight, x.dtype), len(x)
    rows = 1 if count == 1 else BLOCK_ROWS
    room = -(-count // rows) * rows
    tiles, groups, _ = weight.parts["scale"].shape
    digits = torch.empty(split.column_bytes * room * x.shape[1], dtype=torch.int8)
    records = torch.empty(room * groups * split.record_bytes, dtype=torch.int8)
    y = torch.empty(room, tiles * TILE_ROWS, dtype=x.dtype)
    written = (digits.data_ptr(), records.data_ptr())
    compile_split(x.dtype, layout.group, split).run_single(x.data_ptr(), *written, count, room, groups)
    compile_matmul(layout, split, rows, x.dtype)(
        *written, y.data_ptr(), *part_addresses(weight), tiles, groups, room
    )
    return y[:count, : weight.shape[0]]


def matmul_dequantized(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]: some rows of W at a time are dequantized to the dtype of x."""
    layout, x = InterleavedLayout.from_weight(weight), reorder_columns(x, weight)
    tiles, groups, _ = weight.parts["scale"].shape
    width = PANEL_ROWS // TILE_ROWS  # tiles
    y = torch.empty(len(x), tiles * TILE_ROWS, dtype=x.dtype)
    program, parts = compile_dequantize(layout, x.dtype), part_addresses(weight)
    panel = torch.empty(x.shape[1] * min(width, tiles) * TILE_ROWS, dtype=x.dtype)
    for first in range(0, tiles, width):
        count = min(width, tiles - first)
        program(panel.data_ptr(), *parts, first, count, groups)
        some = panel[: x.shape[1] * count * TILE_ROWS].view(x.shape[1], -1)
        torch.mm(x, some, out=y[:, first * TILE_ROWS : (first + count) * TILE_ROWS])
    return y[:, : weight.shape[0]]


def reorder_columns(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x with its columns in the order of the weight's, filled up to whole groups."""
    assert x.shape[1] == weight.shape[1]  # the programs take the weight's word for it
    if "columns" in weight.parts:
        x = x[:, weight.parts["columns"]]
    assert weight.group is not None
    missing = weight.parts["scale"].shape[1] * weight.group - x.shape[1]
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def part_addresses(weight: QuantizedTensor) -> list[int]:
    return [weight.parts[name].data_ptr() if name in weight.parts else 0 for name in PART_NAMES]

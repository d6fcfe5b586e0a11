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
# Of x, as many as registers hold sums of. One core of a Xeon with AVX-VNNI: 2 rows 110 GFLOP/s, 4 rows 95.
BLOCK_ROWS = {"avxvnni": 2, "dotprod": 2}
MAX_BLOCK_ROWS = 4  # of variants that are not named
CACHED_ROWS = 64  # of x: they stay in a core's own cache while W passes by
# Of x, where more are worth dequantizing: AMX, bfloat16, 8192 x 2048: 64 rows 6.4 ms so and 7.9 dequantized, 128
# rows 12.7 and 8.5
MAX_ROWS = 64


@CompileOnce
def compile_split(kind: torch.dtype, group: int, split: SplitFormat) -> CompiledKernel:
    return CompiledKernel(lambda p: matmul_ir.emit_split(p, kind, group, split), "split", 6)


@CompileOnce
def compile_matmul(layout: InterleavedLayout, split: SplitFormat, rows: int, out: torch.dtype) -> CompiledKernel:
    return CompiledKernel(
        lambda p: matmul_ir.emit_matmul(p, layout, split, rows, out), "multiply", 6 + len(PART_NAMES)
    )


def block_rows() -> int:
    """Rows of x that share what is decoded of W."""
    return BLOCK_ROWS.get(processor.byte_product(processor.features()), MAX_BLOCK_ROWS)


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
    for rows in (block_rows(), 1):
        compile_matmul.compile_ahead(layout, split, rows, kind)
    compile_dequantize.compile_ahead(layout, kind)


def integers_are_faster(weight: QuantizedTensor, kind: torch.dtype) -> bool:
    """Are products with integers faster than those of a dequantized weight, however many rows x has?

    One core of a Xeon, 512 rows, 2048 x 2048 Q4_0, GFLOP/s of integers and dequantized: two planes of float32 with
    AVX2 87 and 68, AVX-512 125 and 116, AVX-512 VNNI 154 and 116; of bfloat16 without AMX 154 and 76; three planes
    with AVX2 57 and 68.
    """
    tiles = kind == torch.bfloat16 and torch.cpu._is_amx_tile_supported() and not processor.forced_level()
    return split_format(weight, kind).planes <= 2 and not tiles


def matmul_integers(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]: W is decoded once for every 2 or 4 rows."""
    layout, x = InterleavedLayout.from_weight(weight), reorder_columns(x, weight)
    y = torch.empty(len(x), weight.parts["scale"].shape[0] * TILE_ROWS, dtype=x.dtype)
    for begin in range(0, len(x), CACHED_ROWS):
        some = slice(begin, begin + CACHED_ROWS)
        multiply_rows(x[some], weight, layout, y[some])
    return y[:, : weight.shape[0]]


def multiply_rows(x: Tensor, weight: QuantizedTensor, layout: InterleavedLayout, y: Tensor) -> None:
    """x: [M, K], M up to CACHED_ROWS -> y [M, 16 tiles]"""
    split, count = split_format(weight, x.dtype), len(x)
    rows = 1 if count == 1 else block_rows()
    room = -(-count // rows) * rows
    tiles, groups, _ = weight.parts["scale"].shape
    digits = torch.empty(split.column_bytes * room * x.shape[1], dtype=torch.int8)
    records = torch.empty(room * groups * split.record_bytes, dtype=torch.int8)
    # The last block of rows may be filled up, and so may its results.
    padded = y if room == count else y.new_empty(room, tiles * TILE_ROWS)
    written = (digits.data_ptr(), records.data_ptr())
    run = compile_split(x.dtype, layout.group, split)
    (run if count > MAX_BLOCK_ROWS else run.run_single)(x.data_ptr(), *written, count, room, groups)
    compile_matmul(layout, split, rows, x.dtype)(
        *written, padded.data_ptr(), *part_addresses(weight), tiles, groups, room
    )
    if room > count:
        y.copy_(padded[:count])


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

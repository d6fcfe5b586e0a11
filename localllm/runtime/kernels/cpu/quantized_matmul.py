"""y = x W^T for quantized W in the interleaved layout, by integer products or on a dequantized W.

In either, the result for a row of x does not depend on the other rows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.hardware import processor
from localllm.quant.packing import INTERLEAVED_BITS, PANEL_ROWS, TILE_ROWS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import matmul_ir
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce, KernelSource, float_bits
from localllm.runtime.kernels.cpu.layout import PART_NAMES, InterleavedLayout
from localllm.runtime.kernels.cpu.matmul_ir import CACHED_ROWS, ROW_ADDRESSES, ROW_COUNTS, SplitFormat

PLANES_BY_DTYPE = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}
# Rows of x per pass over W, by variant: as many accumulators as registers hold. One core of a Xeon with AVX-VNNI:
# 2 rows 110 GFLOP/s, 4 rows 95.
BLOCK_ROWS = {"avxvnni": 2, "i8mm": 2, "dotprod": 2}
MAX_BLOCK_ROWS = 4  # rows of x per pass for all other variants
UNPACKED_ROWS = 8  # rows of x above which the codes of a tile are unpacked once for all
# Rows of x above which a dequantized W is faster. AMX, bfloat16, 8192 x 2048: 64 rows take 6.4 ms with integers
# and 7.9 ms dequantized, 128 rows 12.7 and 8.5 ms.
MAX_ROWS = 64


@CompileOnce
def compile_split(dtype: torch.dtype, group: int, split: SplitFormat) -> KernelSource:
    return KernelSource(lambda p: matmul_ir.emit_split(p, dtype, group, split), "split", 6)


@CompileOnce
def compile_matmul(
    layout: InterleavedLayout, split: SplitFormat, rows: int, out: torch.dtype, unpack: bool
) -> KernelSource:
    return KernelSource(
        lambda p: matmul_ir.emit_matmul(p, layout, split, rows, out, unpack=unpack),
        "quantized_matmul",
        6 + len(PART_NAMES),
    )


@CompileOnce
def compile_row_matmul(layout: InterleavedLayout, split: SplitFormat, dtype: torch.dtype) -> KernelSource:
    arguments = ROW_ADDRESSES + len(PART_NAMES) + ROW_COUNTS + 1
    return KernelSource(
        lambda p: matmul_ir.emit_row_matmul(p, layout, split, dtype), "quantized_row_matmul", arguments
    )


@CompileOnce
def compile_dequantize(layout: InterleavedLayout, out: torch.dtype) -> KernelSource:
    return KernelSource(lambda p: matmul_ir.emit_dequantize(p, layout, out), "dequantize", 4 + len(PART_NAMES))


def compile_ahead(weight: QuantizedTensor, dtype: torch.dtype) -> None:
    """Compile in the background all kernels that multiply x of this dtype with the weight."""
    if dtype not in PLANES_BY_DTYPE:
        return
    layout = InterleavedLayout.from_weight(weight)
    split, rows = split_format(weight, dtype, block_rows()), block_rows()
    compile_split.compile_ahead(dtype, layout.group, split)
    for unpack in {False, split.words}:
        compile_matmul.compile_ahead(layout, split, rows, dtype, unpack)
    compile_row_matmul.compile_ahead(layout, split_format(weight, dtype, 1), dtype)
    if not integers_are_faster(weight, dtype):
        compile_dequantize.compile_ahead(layout, dtype)


def block_rows() -> int:
    """Rows of x per pass over W."""
    return BLOCK_ROWS.get(processor.kernel_target().byte_product, MAX_BLOCK_ROWS)


def split_format(weight: QuantizedTensor, dtype: torch.dtype, rows: int) -> SplitFormat:
    """Return how x of this dtype is split into integers for the weight. rows: of x per pass over W"""
    variant = processor.kernel_target().byte_product
    return SplitFormat.for_processor(variant, INTERLEAVED_BITS[weight.format], planes(weight, dtype), rows)


def planes(weight: QuantizedTensor, dtype: torch.dtype) -> int:
    """Return the bytes of precision that x of this dtype is split into."""
    return weight.activation_bits // 8 if weight.activation_bits else PLANES_BY_DTYPE[dtype]


def integers_are_faster(weight: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Return whether integer products are faster than a dequantized weight for any number of rows.

    One core of a Xeon, 512 rows, 2048 x 2048 Q4_0, GFLOP/s of integers and dequantized: two planes of float32 with
    AVX2 87 and 68, AVX-512 125 and 116, AVX-512 VNNI 154 and 116; of bfloat16 without AMX 154 and 76; three planes
    with AVX2 57 and 68.
    """
    amx = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() and not processor.forced_level()
    return planes(weight, dtype) <= 2 and not amx


def matmul_integers(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out], by integer products: W is decoded once per `block_rows` rows."""
    if x.shape[0] == 1:
        return multiply_row(x, [weight])
    layout, x = InterleavedLayout.from_weight(weight), reorder_columns(x, weight)
    y = torch.empty(len(x), weight.parts["scale"].shape[0] * TILE_ROWS, dtype=x.dtype)
    for begin in range(0, len(x), CACHED_ROWS):
        rows = slice(begin, begin + CACHED_ROWS)
        multiply_rows(x[rows], weight, layout, y[rows])
    return y[:, : weight.shape[0]]


def multiply_rows(x: Tensor, weight: QuantizedTensor, layout: InterleavedLayout, y: Tensor) -> None:
    """x: [M, K] with M <= CACHED_ROWS -> y [M, 16 tiles]"""
    count, rows = len(x), block_rows()
    split = split_format(weight, x.dtype, rows)
    padded_rows = -(-count // rows) * rows
    tiles, groups, _ = weight.parts["scale"].shape
    digits = torch.empty(split.column_bytes * padded_rows * x.shape[1], dtype=torch.int8)
    records = torch.empty(padded_rows * groups * split.record_bytes, dtype=torch.int8)
    padded_y = y if padded_rows == count else y.new_empty(padded_rows, tiles * TILE_ROWS)
    split_x = (digits.data_ptr(), records.data_ptr())
    split_kernel = compile_split(x.dtype, layout.group, split)
    run_split = split_kernel if count > MAX_BLOCK_ROWS else split_kernel.run_single
    run_split(x.data_ptr(), *split_x, count, padded_rows, groups)
    compile_matmul(layout, split, rows, x.dtype, split.words and count > UNPACKED_ROWS)(
        *split_x, padded_y.data_ptr(), *part_addresses(weight), tiles, groups, padded_rows
    )
    if padded_rows > count:
        y.copy_(padded_y[:count])


class RowProduct:
    """The call that multiplies one row of x with a weight, prepared once: a token makes about a hundred of them.

    Preparing takes 15 us, twice that after weights have evicted its code and data from the caches.
    """

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype):
        layout, split = InterleavedLayout.from_weight(weight), split_format(weight, dtype, 1)
        tiles, groups, _ = weight.parts["scale"].shape
        columns = groups * layout.group
        self.kernel = compile_row_matmul(layout, split, dtype)
        self.reorders = "columns" in weight.parts or columns != weight.shape[1]
        self.rows = tiles * TILE_ROWS
        self.scratch_bytes = matmul_ir.row_scratch_bytes(columns, groups, split, dtype)
        self.constants = (*part_addresses(weight), tiles, groups, self.scratch_bytes)

    @classmethod
    def of(cls, weight: QuantizedTensor, dtype: torch.dtype) -> "RowProduct":
        """Return the weight's call for x of this dtype."""
        key = (dtype, processor.kernel_target())
        call = weight.prepared.get(key)
        if call is None:
            call = cls(weight, dtype)
            if isinstance(call.kernel, CompiledKernel):
                weight.prepared[key] = call
        return call

    def __call__(self, x: int, y: int, norm_weight: int = 0, eps: float = 0.0, residual: int = 0) -> None:
        """Arguments are addresses, 0 if there is no norm or no residual."""
        scratch = torch.empty(torch.get_num_threads() * self.scratch_bytes, dtype=torch.uint8)
        optional = (int(norm_weight != 0), int(residual != 0), float_bits(eps))
        self.kernel(x, norm_weight, residual, y, scratch.data_ptr(), *self.constants, *optional)


def multiply_row(
    x: Tensor,
    weights: Sequence[QuantizedTensor],
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + norm(x) W^T for one row, [1, out], with W the weights stacked by rows.

    x: [1, in]; norm_weight: [in] float32 of an RMSNorm; residual: [1, out], contiguous, in the dtype of x. All
    weights but the last, and with a residual all, have whole tiles of rows; with a norm, none reorders columns.
    """
    x, calls = x.contiguous(), [RowProduct.of(weight, x.dtype) for weight in weights]
    y = torch.empty(1, sum([call.rows for call in calls]), dtype=x.dtype)
    address, row_bytes = y.data_ptr(), x.dtype.itemsize
    p_norm = 0 if norm_weight is None else norm_weight.data_ptr()
    p_residual = 0 if residual is None else residual.data_ptr()
    for call, weight in zip(calls, weights, strict=True):
        source = reorder_columns(x, weight) if call.reorders else x
        call(source.data_ptr(), address, p_norm, eps, p_residual)
        address += call.rows * row_bytes
        p_residual += call.rows * row_bytes if p_residual else 0
    count = sum([weight.shape[0] for weight in weights])
    return y if y.shape[1] == count else y[:, :count]


def matmul_dequantized(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]: PANEL_ROWS rows of W at a time are dequantized to the dtype of x."""
    layout, x = InterleavedLayout.from_weight(weight), reorder_columns(x, weight)
    tiles, groups, _ = weight.parts["scale"].shape
    panel_tiles = PANEL_ROWS // TILE_ROWS
    y = torch.empty(len(x), tiles * TILE_ROWS, dtype=x.dtype)
    dequantize, parts = compile_dequantize(layout, x.dtype), part_addresses(weight)
    scratch = torch.empty(x.shape[1] * min(panel_tiles, tiles) * TILE_ROWS, dtype=x.dtype)
    for first in range(0, tiles, panel_tiles):
        count = min(panel_tiles, tiles - first)
        dequantize(scratch.data_ptr(), *parts, first, count, groups)
        panel = scratch[: x.shape[1] * count * TILE_ROWS].view(x.shape[1], -1)
        torch.mm(x, panel, out=y[:, first * TILE_ROWS : (first + count) * TILE_ROWS])
    return y[:, : weight.shape[0]]


def reorder_columns(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Return x with its columns in the order of the weight, padded with zeros to whole groups."""
    assert x.shape[1] == weight.shape[1]  # kernels take K from the weight
    if "columns" in weight.parts:
        x = x[:, weight.parts["columns"]]
    assert weight.group is not None
    padding = weight.parts["scale"].shape[1] * weight.group - x.shape[1]
    return F.pad(x, (0, padding)) if padding else x.contiguous()


def part_addresses(weight: QuantizedTensor) -> list[int]:
    """Addresses of a weight's parts in the order of PART_NAMES; 0 for those that it lacks."""
    return [weight.parts[name].data_ptr() if name in weight.parts else 0 for name in PART_NAMES]

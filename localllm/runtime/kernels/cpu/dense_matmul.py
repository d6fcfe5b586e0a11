"""y = x W^T for W in float32, bfloat16 or float16 as it lies: W is read from memory once for up to 64 rows of x.

Every number of y is one chain of sums, 16 lanes of them along a row of W, whatever stands beside it and however
many threads there are: a row of y depends on its row of x alone, which no product of torch's promises.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.hardware.device import dtype_name
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce, cpu_supported
from localllm.runtime.kernels.cpu.ir import BFLOAT, FLOAT, LANES, Element, Program, Value, Variable
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

BLOCK_ROWS = 4  # of x, beside so many of W in registers; of a single row of x twice as many
MAX_ROWS = 16  # of x where torch may be asked instead: float32, 4096 x 4096: 16 rows 9.1 ms and 14.9 by torch
CACHED_ROWS = 64  # rows of x that stay in a core's own cache while W passes by
STEP_COLUMNS = 2 * LANES  # columns

StepVectors = tuple[Value, Value]


def emit_matmul(p: Program, kind: torch.dtype, rows: int, wide: int, whole: bool) -> None:
    """x [count, columns], W [all, columns] -> y [count, all] in one dtype: its columns `first` .. `last` - 1.

    rows: of x at a time, `wide`: of W, of which last - first is a multiple; whole: columns are whole steps.
    """
    x, w, y = p.load_addresses(3)
    count, columns, width, first, last = p.load_counts(5, begin=3)
    size = kind.itemsize
    begin, end = p.part_range((last - first) / wide)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), count, rows) as row:
        o = first + tile * wide
        ours = [p.address(x, (row + i) * columns * size) for i in range(rows)]
        theirs = [p.address(w, (o + i) * columns * size) for i in range(wide)]
        sums = [[p.variable(p.vector(0.0)) for _ in theirs] for _ in ours]
        steps = columns / STEP_COLUMNS
        with p.loop(p.index_constant(0), steps) as step:
            numbers = [load_step(p, ELEMENT_TYPES[kind], at, step * (STEP_COLUMNS * size)) for at in ours]
            for i, at in enumerate(theirs):
                halves = load_step(p, ELEMENT_TYPES[kind], at, step * (STEP_COLUMNS * size))
                p.prefetch_bytes(at, (step * STEP_COLUMNS + columns * wide) * size, STEP_COLUMNS * size)
                for total, number in zip(sums, numbers, strict=True):
                    multiply_add(p, total[i], number, halves)
        if not whole:
            left = columns - steps * STEP_COLUMNS
            numbers = [load_step(p, ELEMENT_TYPES[kind], at, steps * (STEP_COLUMNS * size), left) for at in ours]
            for i, at in enumerate(theirs):
                halves = load_step(p, ELEMENT_TYPES[kind], at, steps * (STEP_COLUMNS * size), left)
                for total, number in zip(sums, numbers, strict=True):
                    multiply_add(p, total[i], number, halves)
        for r, totals in enumerate(sums):
            for i, total in enumerate(totals):
                p.store_float(
                    p.reduce_sum(total.value), ELEMENT_TYPES[kind], y, ((row + r) * width + o + i) * size
                )


def multiply_add(p: Program, total: Variable, number: StepVectors, halves: StepVectors) -> None:
    for a, b in zip(number, halves, strict=True):
        total.value = p.fma(a, b, total.value)


def load_step(p: Program, kind: Element, row: Value, offset: Value, left: Value | None = None) -> StepVectors:
    """The columns of a step as float32: of bfloat16 the even and the odd ones. left: how many there are, if not
    all; the others are zero."""
    if kind == BFLOAT:
        pairs = p.load_pairs(p.address(row, offset), left)
        return p.bitcast_float(pairs << 16), p.bitcast_float(pairs & -0x10000)
    second = offset + LANES * (4 if kind == FLOAT else 2)
    if left is None:
        return p.load_floats(kind, row, offset), p.load_floats(kind, row, second)
    return p.load_first(kind, p.address(row, offset), left), p.load_first(
        kind, p.address(row, second), left - LANES
    )


@CompileOnce
def compile_matmul(kind: torch.dtype, rows: int, wide: int, whole: bool) -> CompiledKernel:
    return CompiledKernel(lambda p: emit_matmul(p, kind, rows, wide, whole), "plain", 8)


def unsupported(x: Tensor, weight: Tensor) -> str | None:
    """Why it does not take them, if so."""
    if not (x.is_cpu and weight.is_cpu):
        return f"x is on {x.device}"
    if x.dtype not in ELEMENT_TYPES or x.dtype != weight.dtype:
        return f"x is {dtype_name(x.dtype)} and the weight {dtype_name(weight.dtype)}"
    if not weight.is_contiguous() or x.shape[-1] != weight.shape[1] or not weight.numel():
        return "the weight does not lie row by row"
    return None if cpu_supported() else "no kernel is compiled for this processor"


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x: [..., in], weight: [out, in] that are not refused -> [..., out]"""
    out, columns = weight.shape
    count, shape, x = x.numel() // columns, x.shape, x.contiguous()
    rows = BLOCK_ROWS if count > BLOCK_ROWS else count
    room = -(-count // BLOCK_ROWS) * BLOCK_ROWS if count > BLOCK_ROWS else count
    if room > count:
        x = F.pad(x.view(count, columns), (0, 0, 0, room - count))
    y = x.new_empty((*shape[:-1], out) if room == count else (room, out))
    wide = 2 * BLOCK_ROWS if rows == 1 else BLOCK_ROWS
    even = out - out % wide
    from_x, from_w, to_y, size = x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.element_size()
    for begin in range(0, room, CACHED_ROWS):
        ours, made = from_x + begin * columns * size, to_y + begin * out * size
        some = min(CACHED_ROWS, room - begin)
        if even:
            compile_matmul(x.dtype, rows, wide, columns % STEP_COLUMNS == 0)(
                ours, from_w, made, some, columns, out, 0, even
            )
        if even < out:
            compile_matmul(x.dtype, rows, 1, columns % STEP_COLUMNS == 0)(
                ours, from_w, made, some, columns, out, even, out
            )
    return y if room == count else y[:count].view(*shape[:-1], out)

"""y = x W^T for W in float32, bfloat16 or float16 as it lies: W is read once for every 4 rows of x, and from memory
once for many of them.

Every number of y is one chain of sums, 16 lanes of them along a row of W, whatever stands beside it and however
many threads there are: a row of y depends on its row of x alone, which no product of torch's promises.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.device import dtype_name
from localllm.runtime.kernels.cpu.compile import Compiled, Once, runs_here
from localllm.runtime.kernels.cpu.layout import KINDS
from localllm.runtime.kernels.cpu.program import BFLOAT, FLOAT, LANES, Element, Program, Value, Variable

ROWS_AT_ONCE = 4  # of x, beside so many of W in registers; of a single row of x twice as many
MOST_ROWS = 16  # of x where torch may be asked instead: float32, 4096 x 4096: 16 rows 9.1 ms and 14.9 by torch
IN_CACHE = 64  # rows of x that stay in a core's own cache while W passes by
STEP = 2 * LANES  # columns

Step = tuple[Value, Value]


def multiply(p: Program, kind: torch.dtype, rows: int, wide: int, whole: bool) -> None:
    """x [count, columns], W [all, columns] -> y [count, all] in one dtype: of it the columns `first` .. `last` - 1.

    rows: of x at a time, `wide`: of W, of which last - first is a multiple; whole: columns are whole steps.
    """
    x, w, y = p.addresses(3)
    count, columns, width, first, last = p.counts(5, begin=3)
    size = kind.itemsize
    begin, end = p.share((last - first) / wide)
    with p.loop(begin, end) as tile, p.loop(p.index(0), count, rows) as row:
        o = first + tile * wide
        ours = [p.at(x, (row + i) * columns * size) for i in range(rows)]
        theirs = [p.at(w, (o + i) * columns * size) for i in range(wide)]
        sums = [[p.variable(p.vector(0.0)) for _ in theirs] for _ in ours]
        steps = columns / STEP
        with p.loop(p.index(0), steps) as step:
            numbers = [read(p, KINDS[kind], at, step * (STEP * size)) for at in ours]
            for i, at in enumerate(theirs):
                halves = read(p, KINDS[kind], at, step * (STEP * size))
                p.prefetch_lines(at, (step * STEP + columns * wide) * size, STEP * size)
                for total, number in zip(sums, numbers, strict=True):
                    add(p, total[i], number, halves)
        if not whole:
            left = columns - steps * STEP
            numbers = [read(p, KINDS[kind], at, steps * (STEP * size), left) for at in ours]
            for i, at in enumerate(theirs):
                halves = read(p, KINDS[kind], at, steps * (STEP * size), left)
                for total, number in zip(sums, numbers, strict=True):
                    add(p, total[i], number, halves)
        for r, totals in enumerate(sums):
            for i, total in enumerate(totals):
                p.store_float(p.sum(total.value), KINDS[kind], y, ((row + r) * width + o + i) * size)


def add(p: Program, total: Variable, number: Step, halves: Step) -> None:
    for a, b in zip(number, halves, strict=True):
        total.value = p.fma(a, b, total.value)


def read(p: Program, kind: Element, row: Value, offset: Value, left: Value | None = None) -> Step:
    """The columns of a step as float32: of bfloat16 the even and the odd ones. left: how many there are, if not
    all; the others are zero."""
    if kind == BFLOAT:
        pairs = p.load_pairs(p.at(row, offset), left)
        return p.as_floats(pairs << 16), p.as_floats(pairs & -0x10000)
    second = offset + LANES * (4 if kind == FLOAT else 2)
    if left is None:
        return p.load_floats(kind, row, offset), p.load_floats(kind, row, second)
    return p.load_some(kind, p.at(row, offset), left), p.load_some(kind, p.at(row, second), left - LANES)


@Once
def program(kind: torch.dtype, rows: int, wide: int, whole: bool) -> Compiled:
    return Compiled(lambda p: multiply(p, kind, rows, wide, whole), "plain", 8)


def refuses(x: Tensor, weight: Tensor) -> str | None:
    """Why it does not take them, if so."""
    if not (x.is_cpu and weight.is_cpu):
        return f"x is on {x.device}"
    if x.dtype not in KINDS or x.dtype != weight.dtype:
        return f"x is {dtype_name(x.dtype)} and the weight {dtype_name(weight.dtype)}"
    if not weight.is_contiguous() or x.shape[-1] != weight.shape[1] or not weight.numel():
        return "the weight does not lie row by row"
    return None if runs_here() else "no kernel is compiled for this processor"


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x: [..., in], weight: [out, in] that are not refused -> [..., out]"""
    out, columns = weight.shape
    count, shape, x = x.numel() // columns, x.shape, x.contiguous()
    rows = ROWS_AT_ONCE if count > ROWS_AT_ONCE else count
    room = -(-count // ROWS_AT_ONCE) * ROWS_AT_ONCE if count > ROWS_AT_ONCE else count
    if room > count:
        x = F.pad(x.view(count, columns), (0, 0, 0, room - count))
    y = x.new_empty((*shape[:-1], out) if room == count else (room, out))
    wide = 2 * ROWS_AT_ONCE if rows == 1 else ROWS_AT_ONCE
    even = out - out % wide
    from_x, from_w, to_y, size = x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.element_size()
    for begin in range(0, room, IN_CACHE):
        ours, made = from_x + begin * columns * size, to_y + begin * out * size
        some = min(IN_CACHE, room - begin)
        if even:
            program(x.dtype, rows, wide, columns % STEP == 0)(ours, from_w, made, some, columns, out, 0, even)
        if even < out:
            program(x.dtype, rows, 1, columns % STEP == 0)(ours, from_w, made, some, columns, out, even, out)
    return y if room == count else y[:count].view(*shape[:-1], out)

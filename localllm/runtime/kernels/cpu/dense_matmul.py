"""y = x W^T for dense W in float32, bfloat16 or float16: W is read from memory once per 64 rows of x.

x has the dtype of W or is float32; W is then widened in registers, which rounds nothing. Batch invariant: each
element of y is one sum in 16 lanes along a row of W, in an order that depends neither on the other rows of x nor
on the number of threads. No product of torch guarantees that.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.hardware import processor
from localllm.hardware.device import dtype_name
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource, cpu_supported
from localllm.runtime.kernels.cpu.ir import BFLOAT, LANES, Element, Program, Value, Variable, element_bytes
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

BLOCK_ROWS = 4  # rows of x whose products are accumulated in registers
MAX_ROWS = 16  # rows of x up to which it beats torch: float32, 4096 x 4096: 16 rows 9.1 ms, torch 14.9 ms
CACHED_ROWS = 64  # rows of x that stay in a core's L2 cache while W streams past
STEP_COLUMNS = 2 * LANES
# Rows of W per register tile, by rows of x, with the 32 registers of AVX-512 and with others. AVX2, bfloat16 W,
# float32 x, 8192 x 2048, CPU time of 1 row of x: 8 rows of W 0.76 ms, 4 rows 0.62, 2 rows 0.77.
TILE_ROWS_512 = {1: 8, 2: 4, 3: 4, 4: 4}
TILE_ROWS = {1: 4, 2: 2, 3: 4, 4: 4}

StepVectors = tuple[Value, Value]


@functools.cache
def tile_rows(x_rows: int) -> int:
    """Rows of W whose products with `x_rows` rows of x are accumulated in registers."""
    wide = processor.reaches_level(processor.features(), "avx512")
    return (TILE_ROWS_512 if wide else TILE_ROWS)[x_rows]


def emit_matmul(
    p: Program, dtype: torch.dtype, w_dtype: torch.dtype, x_rows: int, w_rows: int, whole_steps: bool
) -> None:
    """x [count, K] and y [count, out] in `dtype`, W [out, K] in `w_dtype` -> columns first .. last - 1 of y.

    x_rows, w_rows: rows per register tile; `count` and last - first are multiples of them.
    whole_steps: K is a multiple of STEP_COLUMNS.
    """
    x, w, y = p.load_addresses(3)
    count, columns, out, first, last = p.load_counts(5, begin=3)
    element, w_element = ELEMENT_TYPES[dtype], ELEMENT_TYPES[w_dtype]
    size, w_size, in_pairs = dtype.itemsize, w_dtype.itemsize, w_element == BFLOAT
    begin, end = p.part_range((last - first) / w_rows)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), count, x_rows) as row:
        o = first + tile * w_rows
        x_addresses = [p.address(x, (row + i) * columns * size) for i in range(x_rows)]
        w_addresses = [p.address(w, (o + i) * columns * w_size) for i in range(w_rows)]
        totals = [[p.variable(p.vector(0.0)) for _ in w_addresses] for _ in x_addresses]
        steps = columns / STEP_COLUMNS

        def add_step(step: Value, left: Value | None = None) -> None:
            x_vectors = [load_step(p, element, at, step, in_pairs, left) for at in x_addresses]
            for i, at in enumerate(w_addresses):
                w_vectors = load_step(p, w_element, at, step, in_pairs, left)
                if left is None:
                    ahead = (step * STEP_COLUMNS + columns * w_rows) * w_size
                    p.prefetch_bytes(at, ahead, STEP_COLUMNS * w_size)
                for row_totals, vectors in zip(totals, x_vectors, strict=True):
                    multiply_add(p, row_totals[i], vectors, w_vectors)

        with p.loop(p.index_constant(0), steps) as step:
            add_step(step)
        if not whole_steps:
            add_step(steps, columns - steps * STEP_COLUMNS)
        for r, row_totals in enumerate(totals):
            for i, total in enumerate(row_totals):
                p.store_float(p.reduce_sum(total.value), element, y, ((row + r) * out + o + i) * size)


def multiply_add(p: Program, total: Variable, x: StepVectors, w: StepVectors) -> None:
    """total += x * w, lane by lane."""
    for a, b in zip(x, w, strict=True):
        total.value = p.fma(a, b, total.value)


def load_step(
    p: Program, element: Element, row: Value, step: Value, in_pairs: bool, left: Value | None = None
) -> StepVectors:
    """Load the 32 columns of a step as float32: the first 16 and the last, or with `in_pairs` even and odd.

    bfloat16 is loaded in pairs. left: number of columns, if fewer; the other lanes are zero.
    """
    offset = step * (STEP_COLUMNS * element_bytes(element))
    if element == BFLOAT:
        pairs = p.load_pairs(p.address(row, offset), left)
        return p.bitcast_float(pairs << 16), p.bitcast_float(pairs & -0x10000)
    second = offset + LANES * element_bytes(element)
    if left is None:
        low, high = p.load_floats(element, row, offset), p.load_floats(element, row, second)
    else:
        low = p.load_first(element, p.address(row, offset), left)
        high = p.load_first(element, p.address(row, second), left - LANES)
    if not in_pairs:
        return low, high
    return p.shuffle(low, high, list(range(0, 2 * LANES, 2))), p.shuffle(low, high, list(range(1, 2 * LANES, 2)))


@CompileOnce
def compile_matmul(
    dtype: torch.dtype, w_dtype: torch.dtype, x_rows: int, w_rows: int, whole_steps: bool
) -> KernelSource:
    return KernelSource(lambda p: emit_matmul(p, dtype, w_dtype, x_rows, w_rows, whole_steps), "dense_matmul", 8)


def unsupported(x: Tensor, weight: Tensor) -> str | None:
    """Return why the kernel does not support these tensors, or None if it does."""
    if not (x.is_cpu and weight.is_cpu):
        return f"x is on {x.device}"
    dtypes = {x.dtype, weight.dtype} <= ELEMENT_TYPES.keys()
    if not dtypes or x.dtype not in (weight.dtype, torch.float32):
        return f"x is {dtype_name(x.dtype)} and the weight {dtype_name(weight.dtype)}"
    if not weight.is_contiguous() or x.shape[-1] != weight.shape[1] or not weight.numel():
        return "the weight is empty, not contiguous, or not of x's width"
    return None if cpu_supported() else "no kernel is compiled for this processor"


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x: [..., in], weight: [out, in], both supported -> [..., out]"""
    out, columns = weight.shape
    count, shape, x = x.numel() // columns, x.shape, x.contiguous()
    if not count:
        return x.new_empty(*shape[:-1], out)
    x_rows = BLOCK_ROWS if count > BLOCK_ROWS else count
    padded_rows = -(-count // BLOCK_ROWS) * BLOCK_ROWS if count > BLOCK_ROWS else count
    if padded_rows > count:
        x = F.pad(x.view(count, columns), (0, 0, 0, padded_rows - count))
    y = x.new_empty((*shape[:-1], out) if padded_rows == count else (padded_rows, out))
    w_rows = tile_rows(x_rows)
    tiled = out - out % w_rows  # the other rows of W are multiplied one by one
    ranges = [(w_rows, 0, tiled)] * (tiled > 0) + [(1, tiled, out)] * (tiled < out)
    size, whole_steps = x.element_size(), columns % STEP_COLUMNS == 0
    for begin in range(0, padded_rows, CACHED_ROWS):
        p_x, p_y = x.data_ptr() + begin * columns * size, y.data_ptr() + begin * out * size
        rows = min(CACHED_ROWS, padded_rows - begin)
        for tile, first, last in ranges:
            run = compile_matmul(x.dtype, weight.dtype, x_rows, tile, whole_steps)
            run(p_x, weight.data_ptr(), p_y, rows, columns, out, first, last)
    return y if padded_rows == count else y[:count].view(*shape[:-1], out)

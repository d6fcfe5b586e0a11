"""The programs behind y = x W^T, for W in lanes.

A few rows of x are cut into planes of bytes: x = s * (256 * high + low) with one s for each group of columns, so
that products are sums of whole numbers, which the processor makes 64 at a time, and exactly. Two planes keep 16
bits of x and three keep 24: what bfloat16 and float32 have. Many rows are worth dequantizing W.
"""

from collections.abc import Callable

import torch

from localllm.runtime.kernels.cpu.ir import FLOAT, INT, LANES, Program, Value, Variable
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES, PART_NAMES, InterleavedLayout, WeightTile

BYTE_MAX = 127  # of the highest plane
MIN_GROUP_MAX = 2.0**-100  # a group of x is scaled as if it had one so large: what is much smaller is lost


def emit_split_bytes(p: Program, kind: torch.dtype, group: int, planes: int) -> None:
    """x [rows, K] -> bytes [planes, room, K] and records [rows, groups]: s, the sum of x, each plane's sum."""
    x, bytes_, records = p.load_addresses(3)
    rows, room, groups = p.load_counts(3, begin=3)
    limit = p.float_constant(BYTE_MAX * 256.0 ** (planes - 1))
    with p.loop(p.index_constant(0), rows * groups) as g:
        here = p.address(x, g * (group * kind.itemsize))
        parts = [p.load_floats(ELEMENT_TYPES[kind], here, i * kind.itemsize) for i in range(0, group, LANES)]
        largest, broken = p.vector(MIN_GROUP_MAX), p.vector(0.0)
        for part in parts:
            # Maxima pass over what is not a number, products do not.
            largest, broken = p.maxnum(largest, p.absolute(part)), p.fma(part, p.vector(0.0), broken)
        top = p.reduce_max(largest)
        inverse = (limit / top).broadcast()
        totals = [p.vector(0, INT)] * planes
        for i, part in enumerate(parts):
            rest = (part * inverse).round_to_int()
            for level in reversed(range(planes)):  # the first plane is the highest
                upper = (rest + 128).signed_shift(8)
                byte = rest - (upper << 8) if level else rest
                p.store_bytes(byte, p.address(bytes_, room * groups * (group * level)), g * group + i * LANES)
                totals[level] = totals[level] + byte
                rest = upper
        sums = [p.reduce_sum_int(total) for total in totals]
        scale = top / limit + p.reduce_nan(broken)
        for i, number in enumerate((scale, join_planes(sums) * scale, *sums)):
            p.store(number, records, g * record_bytes(planes) + 4 * i)


def record_bytes(planes: int) -> int:
    return 4 * (2 + planes)


def join_planes(levels: list[Value]) -> Value:
    """int32 of each plane, the highest first -> the float32 that they stand for together."""
    whole = levels[0].to_float32()
    for lower in levels[1:]:
        whole = whole * 256.0 + lower.to_float32()
    return whole


def emit_matmul(p: Program, layout: InterleavedLayout, planes: int, rows: int, out: torch.dtype) -> None:
    """The planes and records of x, a multiple of `rows` rows, times a weight -> y [rows of x, out]"""
    bytes_, records, y, *parts = p.load_addresses(3 + len(PART_NAMES))
    tiles, groups, count = p.load_counts(3, begin=3 + len(PART_NAMES))
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), count, rows) as first:
        weight = WeightTile.from_parts(p, layout, tile, groups, parts)
        columns = groups * layout.group
        here = [
            [p.address(bytes_, (count * i + first + row) * columns) for i in range(planes)] for row in range(rows)
        ]
        told = [p.address(records, (first + row) * groups * record_bytes(planes)) for row in range(rows)]
        for row, total in enumerate(tile_products(weight, [*zip(here, told, strict=True)], groups)):
            p.store_floats(total, ELEMENT_TYPES[out], y, ((first + row) * tiles + tile) * (LANES * out.itemsize))


SplitRow = tuple[list[Value], Value]  # where a row of x has its planes, and where its records


def tile_products(weight: WeightTile, x: list[SplitRow], groups: Value) -> list[Value]:
    """A row's products with the 16 rows of a tile, of each row of x."""
    p, layout = weight.program, weight.layout

    def zeros() -> list[Variable]:
        return [p.variable(p.vector(0.0)) for _ in x]

    totals, minima = zeros(), zeros()
    blocks = layout.groups_per_block
    if not blocks:
        accumulate_steps(weight, x, p.index_constant(0), groups / layout.groups_per_step, totals, minima)
        return [total.value - least.value for total, least in zip(totals, minima, strict=True)]
    sums, least = zeros(), zeros()
    with p.loop(p.index_constant(0), groups / blocks) as block:
        for variable in (*sums, *least):
            variable.value = p.vector(0.0)
        steps = blocks // layout.groups_per_step
        accumulate_steps(weight, x, block * steps, (block + 1) * steps, sums, least)
        add_scaled(p, totals, sums, weight.load_block("block_scale", block))
        if layout.minimum:
            add_scaled(p, minima, least, weight.load_block("block_minimum", block))
    return [total.value - least.value for total, least in zip(totals, minima, strict=True)]


def add_scaled(p: Program, totals: list[Variable], sums: list[Variable], scale: Value) -> None:
    for total, part in zip(totals, sums, strict=True):
        total.value = p.fma(part.value, scale, total.value)


def accumulate_steps(
    weight: WeightTile, x: list[SplitRow], begin: Value, end: Value, totals: list[Variable], minima: list[Variable]
) -> None:
    """Adds what the steps from `begin` to `end` give: code * scale * x, and minimum * x."""
    p, layout = weight.program, weight.layout
    planes = len(x[0][0])
    with p.loop(begin, end) as step:
        for group, sums in enumerate(dot_groups(weight, x, step)):
            at = step * layout.groups_per_step + group
            scale = weight.load_group("scale", at)
            for row, (_, records) in enumerate(x):
                record = p.address(records, at * record_bytes(planes))
                s = p.load_broadcast(FLOAT, record, 0)
                totals[row].value = p.fma(join_planes(sums[row]), s * scale, totals[row].value)
                if layout.minimum:
                    whole = p.load_broadcast(FLOAT, record, 4)
                    minima[row].value = p.fma(weight.load_group("minimum", at), whole, minima[row].value)


def dot_groups(weight: WeightTile, x: list[SplitRow], step: Value) -> list[list[list[Value]]]:
    """The whole numbers sum(code * plane of x), code being less its zero point: of each group in a step, each row
    of x, each plane."""
    p, layout = weight.program, weight.layout
    planes = len(x[0][0])
    sums = []
    for group in range(layout.groups_per_step):
        at = step * layout.groups_per_step + group
        # Bytes are taken for unsigned: those of INT8 are larger by 128 then.
        zero = weight.load_zero(at) if layout.zero else p.vector(layout.zero_point, INT)
        if layout.bits == 8:
            zero = zero + 128
        begin = [
            [
                p.load_broadcast(INT, p.address(records, at * record_bytes(planes)), 8 + 4 * plane)
                for plane in range(planes)
            ]
            for _, records in x
        ]
        # Two sums, so that one need not wait for the other.
        sums.append([[[p.vector(0, INT) - zero * b, p.vector(0, INT)] for b in row] for row in begin])
    for at, vector_ in enumerate(weight.load_step(step)):
        for half, shift in enumerate(layout.shifts):
            bytes_ = (vector_ >> shift) & 0x0F0F0F0F if layout.bits == 4 else vector_ ^ -0x7F7F7F80
            column = layout.column(at, half)
            chain = half if layout.bits == 4 else at % 2
            for row, (places, _) in enumerate(x):
                for plane, place in enumerate(places):
                    found = sums[column // layout.group][row][plane]
                    four = p.load_broadcast(INT, place, step * layout.step_columns + column)
                    found[chain] = p.dot_bytes(found[chain], bytes_, four)
    return [[[a + b for a, b in row] for row in group] for group in sums]


def emit_dequantize(p: Program, layout: InterleavedLayout, out: torch.dtype) -> None:
    """Some tiles of a weight, dequantized and transposed -> [K, rows of the tiles]"""
    panel, *parts = p.load_addresses(1 + len(PART_NAMES))
    first, tiles, groups = p.load_counts(3, begin=1 + len(PART_NAMES))
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile:
        weight = WeightTile.from_parts(p, layout, first + tile, groups, parts)
        with p.loop(p.index_constant(0), groups / layout.groups_per_step) as step:
            for group in range(layout.groups_per_step):
                value = dequantizer(weight, step * layout.groups_per_step + group)
                for at, vector_ in enumerate(weight.load_step(step)):
                    for half, shift in enumerate(layout.shifts):
                        column = layout.column(at, half)
                        if column // layout.group != group:
                            continue
                        for byte in range(4):
                            code = extract_code(vector_, layout, shift + 8 * byte)
                            place = (step * layout.step_columns + column + byte) * tiles + tile
                            p.store_floats(value(code), ELEMENT_TYPES[out], panel, place * (LANES * out.itemsize))


def extract_code(vector_: Value, layout: InterleavedLayout, shift: int) -> Value:
    """The codes that lie `shift` bits above the lowest, one a lane, as int32."""
    if layout.bits == 4:
        return (vector_ >> shift) & 15
    return (vector_ << (24 - shift)).signed_shift(24)


def dequantizer(weight: WeightTile, group: Value) -> Callable[[Value], Value]:
    """From a group's codes to its numbers, in float32 as the reference computes them."""
    p, layout = weight.program, weight.layout
    zero = weight.load_zero(group) if layout.zero else p.vector(layout.zero_point, INT)

    def scaled(name: str) -> Value:
        found = weight.load_group(name, group)
        if not layout.groups_per_block:
            return found
        return weight.load_block(f"block_{name}", group / layout.groups_per_block) * found

    scale = scaled("scale")
    minimum = scaled("minimum") if layout.minimum else None

    def value(code: Value) -> Value:
        exact = (code - zero).to_float32() * scale
        return exact - minimum if minimum else exact

    return value

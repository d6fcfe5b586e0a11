"""Kernels of y = x W^T for quantized W in the interleaved layout.

x is split into planes of bytes with one scale s per group of columns, x = s * (256 * high + low). Products with
the codes of W are then exact integer sums, up to 64 per instruction, and have the same bits on every processor.
Two planes hold 16 bits of x and three hold 24, the precision of bfloat16 and of float32. For many rows of x it is
faster to dequantize W (`emit_dequantize`).

Without an instruction that adds four byte products to int32, 4-bit codes are multiplied with the planes in pairs
of int16, eight of which can be added before they overflow: 8 * 2 * 15 * 128 < 2^15. 8-bit codes would overflow;
they are widened to 16 bits and multiplied with words of x, two planes per product.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from llvmlite import ir

from localllm.runtime.kernels.cpu.ir import FLOAT, FOUR_BYTES, INT, LANES, Program, Value, Variable
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES, PART_NAMES, InterleavedLayout, WeightTile

BYTE_MAX = 127  # of the highest plane
MIN_GROUP_MAX = 2.0**-100  # lower bound of max(abs(x)) of a group, so that 1 / s is finite
PAIRS_OF_16_BITS = 8  # int16 sums of pairs that are added before they are widened


@dataclass(frozen=True)
class SplitFormat:
    """Representation of x as integers."""

    planes: int  # bytes of precision of a number of x
    words: bool  # digits are int16 instead of int8
    joined: bool  # two planes share one integer sum

    @classmethod
    def for_processor(cls, variant: str, bits: int, planes: int) -> "SplitFormat":
        """bits: width of the codes of W; variant: as in `Program`."""
        joined = variant not in FOUR_BYTES
        return cls(planes, joined and bits == 8, joined)

    @property
    def digits(self) -> int:
        """Integers per number of x, the most significant first."""
        return -(-self.planes // 2) if self.words else self.planes

    @property
    def sums(self) -> int:
        """Integer sums per group of x, and per product of a group with a row of W."""
        return -(-self.planes // 2) if self.joined else self.planes

    def sum_and_shift(self, digit: int) -> tuple[int, int]:
        """Index of the sum that a digit is added to, and its left shift there in bits."""
        if self.words or not self.joined:
            return digit, 0
        return digit // 2, 8 if digit % 2 == 0 and digit + 1 < self.planes else 0

    @property
    def digit_bytes(self) -> int:
        """Size of a digit in memory."""
        return 2 if self.words else 1

    @property
    def column_bytes(self) -> int:
        """Size of all digits of a number of x."""
        return self.digits * self.digit_bytes

    @property
    def record_bytes(self) -> int:
        """Size of a group's record: the scale, the sum of x, and the sums of digits."""
        return 4 * (2 + self.sums)


def emit_split(p: Program, dtype: torch.dtype, group: int, split: SplitFormat) -> None:
    """x [rows, K] -> digits [digits, padded_rows, K] and records [rows, groups]: s, the sum of x, sums of digits.

    Words of four columns are stored in the order 0, 2, 1, 3: the even bytes of W multiply the first two.
    """
    x, digits, records = p.load_addresses(3)
    rows, padded_rows, groups = p.load_counts(3, begin=3)
    limit = p.float_constant(BYTE_MAX * 256.0 ** (split.planes - 1))
    begin, end = p.part_range(rows * groups)
    with p.loop(begin, end) as g:
        start = p.address(x, g * (group * dtype.itemsize))
        numbers = [p.load_floats(ELEMENT_TYPES[dtype], start, i * dtype.itemsize) for i in range(0, group, LANES)]
        largest, nan = p.vector(MIN_GROUP_MAX), p.vector(0.0)
        for number in numbers:
            # The maximum ignores NaN; 0 * x is NaN where x is NaN or infinite.
            largest, nan = p.maxnum(largest, p.absolute(number)), p.fma(number, p.vector(0.0), nan)
        group_max = p.reduce_max(largest)
        inverse = (limit / group_max).broadcast()
        totals = [p.vector(0, INT)] * split.sums
        for i, number in enumerate(numbers):
            rest = (number * inverse).round_to_int()
            for level in reversed(range(split.digits)):  # digit 0 is the most significant
                upper = (rest + 128).signed_shift(8)  # all digits but the first have 8 bits
                digit = rest - (upper << 8) if level else rest
                plane = p.address(digits, padded_rows * groups * (group * level * split.digit_bytes))
                p.store_digits(digit, plane, (g * group + i * LANES) * split.digit_bytes, split.words)
                index, shift = split.sum_and_shift(level)
                totals[index] = totals[index] + (digit << shift)
                rest = upper
        sums = [p.reduce_sum_int(total) for total in totals]
        scale = group_max / limit + p.reduce_nan(nan)
        for i, field in enumerate((scale, join_digits(sums) * scale, *sums)):
            p.store(field, records, g * split.record_bytes + 4 * i)


def join_digits(sums: list[Value]) -> Value:
    """Combine int32 sums of digits, the most significant first, into one float32."""
    joined = sums[0].to_float32()
    for lower in sums[1:]:
        joined = joined * 256.0 + lower.to_float32()
    return joined


def emit_matmul(p: Program, layout: InterleavedLayout, split: SplitFormat, rows: int, out: torch.dtype) -> None:
    """Digits and records of x [count, K] (`emit_split`) times a weight -> y [count, 16 tiles].

    rows: rows of x per pass over a tile; `count` is a multiple of it.
    """
    digits, records, y, *parts = p.load_addresses(3 + len(PART_NAMES))
    tiles, groups, count = p.load_counts(3, begin=3 + len(PART_NAMES))
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), count, rows) as first:
        weight = WeightTile.from_parts(p, layout, tile, groups, parts)
        columns = groups * layout.group
        row_digits = [
            [
                p.address(digits, (count * i + first + row) * columns * split.digit_bytes)
                for i in range(split.digits)
            ]
            for row in range(rows)
        ]
        row_records = [p.address(records, (first + row) * groups * split.record_bytes) for row in range(rows)]
        x = [SplitRow(split, *row) for row in zip(row_digits, row_records, strict=True)]
        for row, total in enumerate(tile_products(weight, x, groups)):
            p.store_floats(total, ELEMENT_TYPES[out], y, ((first + row) * tiles + tile) * (LANES * out.itemsize))


@dataclass(frozen=True)
class SplitRow:
    """Addresses of the digits and records of one row of x."""

    split: SplitFormat
    digits: list[Value]
    records: Value

    def load_record(self, group: Value, field: int, element: ir.Type) -> Value:
        """Load one field of a group's record into all lanes."""
        p = self.records.program
        return p.load_broadcast(element, p.address(self.records, group * self.split.record_bytes), 4 * field)

    def load_columns(self, digit: int, column: Value) -> Value:
        """Load four bytes, or two words, from a column on into all lanes."""
        p = self.records.program
        return p.load_broadcast(INT, self.digits[digit], column * self.split.digit_bytes)


def tile_products(weight: WeightTile, x: list[SplitRow], groups: Value) -> list[Value]:
    """Products of each row of x with the 16 rows of a tile, float32."""
    p, layout = weight.program, weight.layout

    def zeros() -> list[Variable]:
        return [p.variable(p.vector(0.0)) for _ in x]

    totals, minima = zeros(), zeros()
    groups_per_block = layout.groups_per_block
    if not groups_per_block:
        accumulate_steps(weight, x, p.index_constant(0), groups / layout.groups_per_step, totals, minima)
        return [total.value - minimum.value for total, minimum in zip(totals, minima, strict=True)]
    block_totals, block_minima = zeros(), zeros()
    with p.loop(p.index_constant(0), groups / groups_per_block) as block:
        for variable in (*block_totals, *block_minima):
            variable.value = p.vector(0.0)
        steps = groups_per_block // layout.groups_per_step
        accumulate_steps(weight, x, block * steps, (block + 1) * steps, block_totals, block_minima)
        add_scaled(p, totals, block_totals, weight.load_block("block_scale", block))
        if layout.minimum:
            add_scaled(p, minima, block_minima, weight.load_block("block_minimum", block))
    return [total.value - minimum.value for total, minimum in zip(totals, minima, strict=True)]


def add_scaled(p: Program, totals: list[Variable], terms: list[Variable], scale: Value) -> None:
    """totals += terms * scale"""
    for total, term in zip(totals, terms, strict=True):
        total.value = p.fma(term.value, scale, total.value)


def accumulate_steps(
    weight: WeightTile, x: list[SplitRow], begin: Value, end: Value, totals: list[Variable], minima: list[Variable]
) -> None:
    """Add steps `begin` .. `end - 1` to the totals: code * scale * x, and minimum * x."""
    p, layout = weight.program, weight.layout
    with p.loop(begin, end) as step:
        for i, sums in enumerate(dot_groups(weight, x, step)):
            group = step * layout.groups_per_step + i
            scale = weight.load_group("scale", group)
            for row, x_row in enumerate(x):
                s = x_row.load_record(group, 0, FLOAT)
                totals[row].value = p.fma(join_digits(sums[row]), s * scale, totals[row].value)
                if layout.minimum:
                    x_sum = x_row.load_record(group, 1, FLOAT)
                    minima[row].value = p.fma(weight.load_group("minimum", group), x_sum, minima[row].value)


GroupSums = list[list[list[Value]]]  # int32 vectors by group of a step, row of x, and sum of its `SplitFormat`


def dot_groups(weight: WeightTile, x: list[SplitRow], step: Value) -> GroupSums:
    """Integer sums of (code - zero point) * digit of x over each group of a step.

    They start at -(zero point) * (sum of digits), so that codes are multiplied as they are stored.
    """
    p, layout, split = weight.program, weight.layout, x[0].split
    sums = []
    # INT8 codes are shifted by 128 for instructions that take unsigned bytes.
    biased = layout.bits == 8 and p.multiplies_four_bytes and p.takes_unsigned_bytes
    for i in range(layout.groups_per_step):
        group = step * layout.groups_per_step + i
        zero = weight.load_zero(group) if layout.zero else p.vector(layout.zero_point, INT)
        if biased:
            zero = zero + 128
        if not layout.zero and not layout.zero_point and not biased:
            sums.append([[p.vector(0, INT)] * split.sums for _ in x])
        else:
            sums.append(
                [
                    [p.vector(0, INT) - zero * row.load_record(group, 2 + k, INT) for k in range(split.sums)]
                    for row in x
                ]
            )
    dot = dot_words if split.words else dot_planes if p.multiplies_four_bytes else dot_pairs_of_bytes
    return dot(weight, x, step, sums)


def dot_planes(weight: WeightTile, x: list[SplitRow], step: Value, sums: GroupSums) -> GroupSums:
    """Multiply with instructions that add four byte products to int32."""
    p, layout = weight.program, weight.layout
    # Two accumulators hide the latency of the instruction, where registers hold them.
    count = 2 if len(x) == 1 or p.variant == "avx512vnni" else 1
    accumulators = [[[[digit, p.vector(0, INT)][:count] for digit in row] for row in group] for group in sums]
    for at, packed in enumerate(weight.load_step(step)):
        for half, shift in enumerate(layout.shifts):
            codes = (packed >> shift) & 0x0F0F0F0F if layout.bits == 4 else packed
            if layout.bits == 8 and p.takes_unsigned_bytes:
                codes = packed ^ -0x7F7F7F80  # adds 128 to each byte
            column = layout.column(at, half)
            chain = (half if layout.bits == 4 else at) % count
            for row, x_row in enumerate(x):
                for digit in range(len(x_row.digits)):
                    chains = accumulators[column // layout.group][row][digit]
                    four = x_row.load_columns(digit, step * layout.step_columns + column)
                    chains[chain] = p.dot_bytes(chains[chain], codes, four)
    return [[[sum_values(chains) for chains in row] for row in group] for group in accumulators]


def dot_pairs_of_bytes(weight: WeightTile, x: list[SplitRow], step: Value, sums: GroupSums) -> GroupSums:
    """Multiply 4-bit codes with instructions that add two byte products in int16."""
    p, layout, split = weight.program, weight.layout, x[0].split
    shorts: dict[tuple[int, int, int], list[Value]] = {}  # int16 terms by group, row and digit

    def widen(key: tuple[int, int, int]) -> None:
        group, row, digit = key
        index, shift = split.sum_and_shift(digit)
        powers = p.as_shorts(p.vector(0x00010001 << shift, INT))
        sums[group][row][index] = sums[group][row][index] + p.dot_pairs(sum_values(shorts.pop(key)), powers)

    for at, packed in enumerate(weight.load_step(step)):
        for half, shift in enumerate(layout.shifts):
            codes = (packed >> shift) & 0x0F0F0F0F
            column = layout.column(at, half)
            for row, x_row in enumerate(x):
                for digit in range(len(x_row.digits)):
                    key = (column // layout.group, row, digit)
                    four = x_row.load_columns(digit, step * layout.step_columns + column)
                    terms = shorts.setdefault(key, [])
                    terms.append(p.dot_byte_pairs(codes, four))
                    if len(terms) == PAIRS_OF_16_BITS:
                        widen(key)
    for key in list(shorts):
        widen(key)
    return sums


def sum_values(terms: list[Value]) -> Value:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def dot_words(weight: WeightTile, x: list[SplitRow], step: Value, sums: GroupSums) -> GroupSums:
    """Multiply 8-bit codes, widened to int16, with instructions that add two int16 products."""
    p, layout = weight.program, weight.layout
    for at, packed in enumerate(weight.load_step(step)):
        column = layout.column(at, 0)
        for pair, codes in enumerate(p.extend_byte_pairs(packed)):
            for row, x_row in enumerate(x):
                for digit in range(len(x_row.digits)):
                    two = p.as_shorts(x_row.load_columns(digit, step * layout.step_columns + (column + 2 * pair)))
                    row_sums = sums[column // layout.group][row]
                    row_sums[digit] = row_sums[digit] + p.dot_pairs(codes, two)
    return sums


def emit_dequantize(p: Program, layout: InterleavedLayout, out: torch.dtype) -> None:
    """Dequantize and transpose tiles first .. first + tiles - 1 of a weight -> panel [K, 16 tiles]."""
    panel, *parts = p.load_addresses(1 + len(PART_NAMES))
    first, tiles, groups = p.load_counts(3, begin=1 + len(PART_NAMES))
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile:
        weight = WeightTile.from_parts(p, layout, first + tile, groups, parts)
        with p.loop(p.index_constant(0), groups / layout.groups_per_step) as step:
            for group in range(layout.groups_per_step):
                dequantize = dequantizer(weight, step * layout.groups_per_step + group)
                for at, packed in enumerate(weight.load_step(step)):
                    for half, shift in enumerate(layout.shifts):
                        column = layout.column(at, half)
                        if column // layout.group != group:
                            continue
                        for byte in range(4):
                            code = extract_code(packed, layout, shift + 8 * byte)
                            index = (step * layout.step_columns + column + byte) * tiles + tile
                            number = dequantize(code)
                            p.store_floats(number, ELEMENT_TYPES[out], panel, index * (LANES * out.itemsize))


def extract_code(packed: Value, layout: InterleavedLayout, shift: int) -> Value:
    """Extract the code at bit `shift` of each lane as int32."""
    if layout.bits == 4:
        return (packed >> shift) & 15
    return (packed << (24 - shift)).signed_shift(24)


def dequantizer(weight: WeightTile, group: Value) -> Callable[[Value], Value]:
    """Return a function from codes of a group to float32, in the operations of the reference."""
    p, layout = weight.program, weight.layout
    zero = weight.load_zero(group) if layout.zero else p.vector(layout.zero_point, INT)

    def scaled(name: str) -> Value:
        factor = weight.load_group(name, group)
        if not layout.groups_per_block:
            return factor
        return weight.load_block(f"block_{name}", group / layout.groups_per_block) * factor

    scale = scaled("scale")
    minimum = scaled("minimum") if layout.minimum else None

    def dequantize(code: Value) -> Value:
        number = (code - zero).to_float32() * scale
        return number - minimum if minimum else number

    return dequantize

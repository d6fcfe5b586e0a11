"""The programs behind y = x W^T, for W in lanes.

A few rows of x are cut into planes of bytes: x = s * (256 * high + low) with one s for each group of columns, so
that products are sums of whole numbers, which the processor makes up to 64 at a time, and exactly: with the same
bits on every processor. Two planes keep 16 bits of x and three keep 24: what bfloat16 and float32 have. Many rows
are worth dequantizing W.

Where no instruction adds four products of bytes to 32 bits, codes of 4 bits meet the planes in pairs, which fit in
16 bits eight times over: 8 * 2 * 15 * 128 < 2^15. Codes of 8 bits do not, and are widened to meet x in whole words
of 16 bits: two planes in one product.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from llvmlite import ir

from localllm.runtime.kernels.cpu.ir import FLOAT, FOUR_BYTES, INT, LANES, Program, Value, Variable
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES, PART_NAMES, InterleavedLayout, WeightTile

BYTE_MAX = 127  # of the highest plane
MIN_GROUP_MAX = 2.0**-100  # a group of x is scaled as if it had one so large: what is much smaller is lost


PAIRS_OF_16_BITS = 8  # that are added before they are widened


@dataclass(frozen=True)
class SplitFormat:
    """How x is split into integers: `planes` bytes deep, as bytes or as words of 16 bits, and with sums of single
    planes or of two together."""

    planes: int
    words: bool
    joined: bool

    @classmethod
    def of(cls, variant: str, bits: int, planes: int) -> "SplitFormat":
        """bits: of the codes of W that x meets; variant: as in Program."""
        joined = variant not in FOUR_BYTES
        return cls(planes, joined and bits == 8, joined)

    @property
    def digits(self) -> int:
        """How many integers a number of x becomes, the highest first."""
        return -(-self.planes // 2) if self.words else self.planes

    @property
    def sums(self) -> int:
        """How many sums a group of x has, and its products with a row of W."""
        return -(-self.planes // 2) if self.joined else self.planes

    def sum_of(self, digit: int) -> tuple[int, int]:
        """Which sum a digit counts in, and by how many bits it is shifted there."""
        if self.words or not self.joined:
            return digit, 0
        return digit // 2, 8 if digit % 2 == 0 and digit + 1 < self.planes else 0

    @property
    def digit_bytes(self) -> int:
        """Bytes that one of them is stored in."""
        return 2 if self.words else 1

    @property
    def column_bytes(self) -> int:
        return self.digits * self.digit_bytes

    @property
    def record_bytes(self) -> int:
        return 4 * (2 + self.sums)


def emit_split(p: Program, kind: torch.dtype, group: int, split: SplitFormat) -> None:
    """x [rows, K] -> digits [digits, room, K] and records [rows, groups]: s, the sum of x, sums of digits.

    Of words, each four columns lie as 0, 2, 1, 3: the even bytes of W meet the first two."""
    x, bytes_, records = p.load_addresses(3)
    rows, room, groups = p.load_counts(3, begin=3)
    limit = p.float_constant(BYTE_MAX * 256.0 ** (split.planes - 1))
    begin, end = p.part_range(rows * groups)
    with p.loop(begin, end) as g:
        here = p.address(x, g * (group * kind.itemsize))
        parts = [p.load_floats(ELEMENT_TYPES[kind], here, i * kind.itemsize) for i in range(0, group, LANES)]
        largest, broken = p.vector(MIN_GROUP_MAX), p.vector(0.0)
        for part in parts:
            # Maxima pass over what is not a number, products do not.
            largest, broken = p.maxnum(largest, p.absolute(part)), p.fma(part, p.vector(0.0), broken)
        top = p.reduce_max(largest)
        inverse = (limit / top).broadcast()
        totals = [p.vector(0, INT)] * split.sums
        for i, part in enumerate(parts):
            rest = (part * inverse).round_to_int()
            for level in reversed(range(split.digits)):  # the first digit is the highest
                upper = (rest + 128).signed_shift(8)  # below the first, all digits have 8 bits
                digit = rest - (upper << 8) if level else rest
                plane = p.address(bytes_, room * groups * (group * level * split.digit_bytes))
                p.store_digits(digit, plane, (g * group + i * LANES) * split.digit_bytes, split.words)
                at, shift = split.sum_of(level)
                totals[at] = totals[at] + (digit << shift)
                rest = upper
        sums = [p.reduce_sum_int(total) for total in totals]
        scale = top / limit + p.reduce_nan(broken)
        for i, number in enumerate((scale, join_digits(sums) * scale, *sums)):
            p.store(number, records, g * split.record_bytes + 4 * i)


def join_digits(levels: list[Value]) -> Value:
    """int32 of each sum of digits, the highest first -> the float32 that they stand for together."""
    whole = levels[0].to_float32()
    for lower in levels[1:]:
        whole = whole * 256.0 + lower.to_float32()
    return whole


def emit_matmul(p: Program, layout: InterleavedLayout, split: SplitFormat, rows: int, out: torch.dtype) -> None:
    """The digits and records of x, a multiple of `rows` rows, times a weight -> y [rows of x, out]"""
    bytes_, records, y, *parts = p.load_addresses(3 + len(PART_NAMES))
    tiles, groups, count = p.load_counts(3, begin=3 + len(PART_NAMES))
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), count, rows) as first:
        weight = WeightTile.from_parts(p, layout, tile, groups, parts)
        columns = groups * layout.group
        here = [
            [
                p.address(bytes_, (count * i + first + row) * columns * split.digit_bytes)
                for i in range(split.digits)
            ]
            for row in range(rows)
        ]
        told = [p.address(records, (first + row) * groups * split.record_bytes) for row in range(rows)]
        x = [SplitRow(split, *row) for row in zip(here, told, strict=True)]
        for row, total in enumerate(tile_products(weight, x, groups)):
            p.store_floats(total, ELEMENT_TYPES[out], y, ((first + row) * tiles + tile) * (LANES * out.itemsize))


@dataclass(frozen=True)
class SplitRow:
    """The addresses of a row of x."""

    split: SplitFormat
    digits: list[Value]
    records: Value

    def load_record(self, group: Value, field: int, kind: ir.Type) -> Value:
        """The `field`-th number of a group's record, in all lanes."""
        p = self.records.program
        return p.load_broadcast(kind, p.address(self.records, group * self.split.record_bytes), 4 * field)

    def load_columns(self, digit: int, column: Value) -> Value:
        """Four bytes, or two words, from a column on: in all lanes."""
        p = self.records.program
        return p.load_broadcast(INT, self.digits[digit], column * self.split.digit_bytes)


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
    with p.loop(begin, end) as step:
        for group, sums in enumerate(dot_groups(weight, x, step)):
            at = step * layout.groups_per_step + group
            scale = weight.load_group("scale", at)
            for row, of_x in enumerate(x):
                s = of_x.load_record(at, 0, FLOAT)
                totals[row].value = p.fma(join_digits(sums[row]), s * scale, totals[row].value)
                if layout.minimum:
                    whole = of_x.load_record(at, 1, FLOAT)
                    minima[row].value = p.fma(weight.load_group("minimum", at), whole, minima[row].value)


def dot_groups(weight: WeightTile, x: list[SplitRow], step: Value) -> list[list[list[Value]]]:
    """The whole numbers sum(code * digit of x), code being less its zero point: of each group in a step, each row
    of x, each sum of its format."""
    p, layout, split = weight.program, weight.layout, x[0].split
    sums = []
    # Bytes that are taken for unsigned are larger by 128 than those of INT8.
    biased = layout.bits == 8 and p.multiplies_four_bytes and p.takes_unsigned_bytes
    for group in range(layout.groups_per_step):
        at = step * layout.groups_per_step + group
        zero = weight.load_zero(at) if layout.zero else p.vector(layout.zero_point, INT)
        if biased:
            zero = zero + 128
        if not layout.zero and not layout.zero_point and not biased:
            sums.append([[p.vector(0, INT)] * split.sums for _ in x])
        else:
            sums.append(
                [
                    [p.vector(0, INT) - zero * row.load_record(at, 2 + i, INT) for i in range(split.sums)]
                    for row in x
                ]
            )
    dot = dot_words if split.words else dot_planes if p.multiplies_four_bytes else dot_pairs_of_bytes
    return dot(weight, x, step, sums)


GroupSums = list[list[list[Value]]]  # of each group, row of x and sum of its format


def dot_planes(weight: WeightTile, x: list[SplitRow], step: Value, sums: GroupSums) -> GroupSums:
    """By instructions that add four products of bytes."""
    p, layout = weight.program, weight.layout
    # Two sums, so that one need not wait for the other, where registers hold them.
    count = 2 if len(x) == 1 or p.variant == "avx512vnni" else 1
    chains = [[[[digit, p.vector(0, INT)][:count] for digit in row] for row in group] for group in sums]
    for at, vector_ in enumerate(weight.load_step(step)):
        for half, shift in enumerate(layout.shifts):
            bytes_ = (vector_ >> shift) & 0x0F0F0F0F if layout.bits == 4 else vector_
            if layout.bits == 8 and p.takes_unsigned_bytes:
                bytes_ = vector_ ^ -0x7F7F7F80
            column = layout.column(at, half)
            chain = (half if layout.bits == 4 else at) % count
            for row, of_x in enumerate(x):
                for digit in range(len(of_x.digits)):
                    found = chains[column // layout.group][row][digit]
                    four = of_x.load_columns(digit, step * layout.step_columns + column)
                    found[chain] = p.dot_bytes(found[chain], bytes_, four)
    return [[[sum_values(digit) for digit in row] for row in group] for group in chains]


def dot_pairs_of_bytes(weight: WeightTile, x: list[SplitRow], step: Value, sums: GroupSums) -> GroupSums:
    """Codes of 4 bits by instructions that add two products of bytes in 16 bits."""
    p, layout, split = weight.program, weight.layout, x[0].split
    shorts: dict[tuple[int, int, int], list[Value]] = {}

    def widen(key: tuple[int, int, int]) -> None:
        group, row, digit = key
        at, shift = split.sum_of(digit)
        weights = p.as_shorts(p.vector(0x00010001 << shift, INT))
        sums[group][row][at] = sums[group][row][at] + p.dot_pairs(sum_values(shorts.pop(key)), weights)

    for at, vector_ in enumerate(weight.load_step(step)):
        for half, shift in enumerate(layout.shifts):
            codes = (vector_ >> shift) & 0x0F0F0F0F
            column = layout.column(at, half)
            for row, of_x in enumerate(x):
                for digit in range(len(of_x.digits)):
                    key = (column // layout.group, row, digit)
                    four = of_x.load_columns(digit, step * layout.step_columns + column)
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
    """Codes of 8 bits, widened, by instructions that add two products of 16 bits."""
    p, layout = weight.program, weight.layout
    for at, vector_ in enumerate(weight.load_step(step)):
        column = layout.column(at, 0)
        for pair, codes in enumerate(p.extend_byte_pairs(vector_)):
            for row, of_x in enumerate(x):
                for digit in range(len(of_x.digits)):
                    two = p.as_shorts(of_x.load_columns(digit, step * layout.step_columns + (column + 2 * pair)))
                    found = sums[column // layout.group][row]
                    found[digit] = found[digit] + p.dot_pairs(codes, two)
    return sums


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

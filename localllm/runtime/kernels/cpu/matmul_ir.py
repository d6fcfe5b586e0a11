"""Kernels of y = x W^T for quantized W in the interleaved layout.

x is split into planes of bytes with one scale s per group of columns, x = s * (256 * high + low). Products with
the codes of W are then exact integer sums, up to 64 per instruction, and have the same bits on every processor.
Two planes hold 16 bits of x and three hold 24, the precision of bfloat16 and of float32. For many rows of x it is
faster to dequantize W (`emit_dequantize`).

Without an instruction that adds four byte products to int32, 4-bit codes are multiplied with the planes in pairs
of int16, eight of which can be added before they overflow: 8 * 2 * 15 * 128 < 2^15. With 6-bit codes two can be
added. 8-bit codes would overflow; they are widened to 16 bits and multiplied with words of x, two planes per
product.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from llvmlite import ir

from localllm.runtime.kernels.cpu.elementwise import emit_rms_norm_row
from localllm.runtime.kernels.cpu.ir import (
    FLOAT,
    FOUR_BYTES,
    INT,
    LANES,
    SHORT_PAIRS,
    Program,
    Value,
    Variable,
    vector_type,
)
from localllm.runtime.kernels.cpu.layout import (
    ELEMENT_TYPES,
    PART_NAMES,
    VECTOR_BYTES,
    InterleavedLayout,
    WeightTile,
)

BYTE_MAX = 127  # of the highest plane
MIN_GROUP_MAX = 2.0**-100  # lower bound of max(abs(x)) of a group, so that 1 / s is finite
CACHED_ROWS = 64  # rows of x that stay in a core's L2 cache while W streams past
CHUNK_COLUMNS = 512  # unpacked at a time: 16 KB of int16, which stay in the L1 cache
SHORT_BYTES = 2
PAIRS_OF_16_BITS = {4: 8, 6: 2}  # int16 sums of pairs that are added before they are widened, by bits of a code


@dataclass(frozen=True)
class SplitFormat:
    """Representation of x as integers."""

    planes: int  # bytes of precision of a number of x
    words: bool  # digits are int16 instead of int8
    joined: bool  # two planes share one integer sum

    @classmethod
    def for_processor(cls, variant: str, bits: int, planes: int, rows: int) -> "SplitFormat":
        """bits: width of the codes of W; rows: of x per pass over W; variant: as in `Program`."""
        joined = variant not in FOUR_BYTES
        # Words of several planes need fewer registers; a single plane takes half the products as bytes.
        words = bits == 8 or (rows > 1 and planes > 1 and variant in SHORT_PAIRS)
        return cls(planes, joined and words, joined)

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
    split_groups(p, dtype, group, split, (x, digits, records), padded_rows * groups, p.part_range(rows * groups))


def split_groups(
    p: Program,
    dtype: torch.dtype,
    group: int,
    split: SplitFormat,
    addresses: tuple[Value, Value, Value],
    plane_groups: Value,
    part: tuple[Value, Value],
) -> None:
    """Split groups `part[0]` .. `part[1] - 1` of x.

    addresses: of x, digits and records; plane_groups: groups in the plane of one digit
    """
    x, digits, records = addresses
    limit = p.float_constant(BYTE_MAX * 256.0 ** (split.planes - 1))
    with p.loop(*part) as g:
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
                plane = p.address(digits, plane_groups * (group * level * split.digit_bytes))
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


ROW_ADDRESSES, ROW_COUNTS = 5, 5  # arguments of `emit_row_matmul` besides the weight's parts and epsilon


def emit_row_matmul(p: Program, layout: InterleavedLayout, split: SplitFormat, dtype: torch.dtype) -> None:
    """residual + W norm(x) for one row: x [K] -> y [16 tiles], where norm and residual are optional.

    A call of its own for each of them takes longer than what it computes. Every thread normalizes and splits all
    of x in its own part of the scratch memory, so that none waits for another.
    """
    x, norm_weight, residual, y, scratch, *parts = p.load_addresses(ROW_ADDRESSES + len(PART_NAMES))
    begin = ROW_ADDRESSES + len(PART_NAMES)
    tiles, groups, scratch_bytes, normed, added = p.load_counts(ROW_COUNTS, begin=begin)
    eps = p.load(FLOAT, p.arguments, 8 * (begin + ROW_COUNTS))
    zero, columns = p.index_constant(0), groups * layout.group
    own = p.address(scratch, p.part * scratch_bytes)
    digits = p.address(own, columns * dtype.itemsize)
    records = p.address(digits, columns * split.column_bytes)
    with p.loop(zero, normed):  # once or never
        emit_rms_norm_row(p, dtype, x, norm_weight, own, columns, eps)
    source = p.select_nonzero(normed, own, x)
    split_groups(p, dtype, layout.group, split, (source, digits, records), groups, (zero, groups))
    planes = [p.address(digits, columns * (i * split.digit_bytes)) for i in range(split.digits)]
    with p.loop(*p.part_range(tiles)) as tile:
        weight = WeightTile.from_parts(p, layout, tile, groups, parts)
        sums = [(p.variable(p.vector(0.0)), p.variable(p.vector(0.0)))]
        accumulate_runs(weight, [SplitRow(split, planes, records)], zero, groups / layout.groups_per_run, sums)
        [(total, minimum)] = sums
        element, offset = ELEMENT_TYPES[dtype], tile * (LANES * dtype.itemsize)
        p.store_floats(total.value - minimum.value, element, y, offset)
        with p.loop(zero, added):  # to the product as it is rounded
            both = (p.load_floats(element, address, offset) for address in (residual, y))
            p.store_floats(sum_values(list(both)), element, y, offset)


def row_scratch_bytes(columns: int, groups: int, split: SplitFormat, dtype: torch.dtype) -> int:
    """Return the bytes of a thread's scratch memory for `emit_row_matmul`, in whole cache lines."""
    size = columns * (dtype.itemsize + split.column_bytes) + groups * split.record_bytes
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES


def emit_matmul(
    p: Program, layout: InterleavedLayout, split: SplitFormat, rows: int, out: torch.dtype, *, unpack: bool
) -> None:
    """Digits and records of x [count, K] (`emit_split`) times a weight -> y [count, 16 tiles].

    rows: rows of x per pass over a tile; `count` is a multiple of it. unpack: widen the codes of a tile once, in
    chunks that stay in the first-level cache, for all rows of x instead of once per pass; then `count` is at most
    CACHED_ROWS, and digits are words.
    """
    digits, records, y, *parts = p.load_addresses(3 + len(PART_NAMES))
    tiles, groups, count = p.load_counts(3, begin=3 + len(PART_NAMES))
    begin, end = p.part_range(tiles)
    columns, zero = groups * layout.group, p.index_constant(0)

    def split_rows(first: Value) -> list[SplitRow]:
        return [
            SplitRow(
                split,
                [
                    p.address(digits, (count * i + first + row) * columns * split.digit_bytes)
                    for i in range(split.digits)
                ],
                p.address(records, (first + row) * groups * split.record_bytes),
            )
            for row in range(rows)
        ]

    def store(row: Value, tile: Value, product: Value) -> None:
        p.store_floats(product, ELEMENT_TYPES[out], y, (row * tiles + tile) * (LANES * out.itemsize))

    if not unpack:
        with p.loop(begin, end) as tile, p.loop(zero, count, rows) as first:
            weight = WeightTile.from_parts(p, layout, tile, groups, parts)
            sums = [(p.variable(p.vector(0.0)), p.variable(p.vector(0.0))) for _ in range(rows)]
            accumulate_runs(weight, split_rows(first), zero, groups / layout.groups_per_run, sums)
            for row, (total, minimum) in enumerate(sums):
                store(first + row, tile, total.value - minimum.value)
        return
    runs = max(1, CHUNK_COLUMNS // layout.run_columns)  # per chunk
    codes = p.stack_buffer(runs * layout.run_columns * LANES * SHORT_BYTES)
    sums_of_rows = p.stack_buffer(CACHED_ROWS * 2 * VECTOR_BYTES)
    with p.loop(begin, end) as tile:
        weight = WeightTile.from_parts(p, layout, tile, groups, parts)
        with p.loop(zero, count * 2) as i:
            p.store(p.vector(0.0), sums_of_rows, i * VECTOR_BYTES)
        with p.loop(zero, groups / layout.groups_per_run, runs) as first_run:
            last_run = p.min_index(first_run + runs, groups / layout.groups_per_run)
            unpacked = UnpackedCodes(codes, first_run * layout.steps_per_run)
            with p.loop(first_run * layout.steps_per_run, last_run * layout.steps_per_run) as step:
                unpacked.store(weight, step)
            with p.loop(zero, count, rows) as first:
                addresses = [p.address(sums_of_rows, (first + row) * (2 * VECTOR_BYTES)) for row in range(rows)]
                sums = [
                    (p.variable(p.load_floats(FLOAT, at)), p.variable(p.load_floats(FLOAT, at, VECTOR_BYTES)))
                    for at in addresses
                ]
                accumulate_runs(weight, split_rows(first), first_run, last_run, sums, unpacked)
                for at, (total, minimum) in zip(addresses, sums, strict=True):
                    p.store(total.value, at)
                    p.store(minimum.value, at, VECTOR_BYTES)
        with p.loop(zero, count) as row:
            at = p.address(sums_of_rows, row * (2 * VECTOR_BYTES))
            store(row, tile, p.load_floats(FLOAT, at) - p.load_floats(FLOAT, at, VECTOR_BYTES))


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


RowSums = list[tuple[Variable, Variable]]  # for each row of x: sums of scale * code * x, and of minimum * x


@dataclass(frozen=True)
class UnpackedCodes:
    """Codes of some steps of a tile as int16, less their zero points, in memory."""

    address: Value
    first_step: Value

    def offset(self, layout: InterleavedLayout, step: Value) -> Value:
        return (step - self.first_step) * (layout.step_columns * LANES * SHORT_BYTES)

    def store(self, weight: WeightTile, step: Value) -> None:
        """Widen and store the codes of a step."""
        p, layout, offset = weight.program, weight.layout, self.offset(weight.layout, step)
        zeros = []
        for i in range(layout.groups_per_step):
            zero = group_zero(weight, step * layout.groups_per_step + i)
            zeros.append(zero and p.as_shorts((zero & 0xFFFF) | (zero << 16)))
        for i, (column, codes) in enumerate(widened_codes(weight, step)):
            zero = zeros[column // layout.group]
            p.store(codes - zero if zero else codes, self.address, offset + i * VECTOR_BYTES)

    def load(self, weight: WeightTile, step: Value) -> "Iterator[tuple[int, Value]]":
        """Load what `widened_codes` returns."""
        p, at = weight.program, weight.program.address(self.address, self.offset(weight.layout, step))
        for i, column in enumerate(word_columns(weight.layout)):
            yield column, p.as_shorts(p.load(vector_type(INT), at, i * VECTOR_BYTES))


def accumulate_runs(
    weight: WeightTile,
    x: list[SplitRow],
    begin: Value,
    end: Value,
    sums: RowSums,
    unpacked: UnpackedCodes | None = None,
) -> None:
    """Add the products of each row of x with the 16 rows of a tile in runs `begin` .. `end - 1`, float32.

    A run is a block with a scale of its own, or, without one, a step.
    """
    p, layout = weight.program, weight.layout
    if not layout.groups_per_block:
        accumulate_steps(weight, x, begin, end, sums, unpacked)
        return
    block_sums = [(p.variable(p.vector(0.0)), p.variable(p.vector(0.0))) for _ in x]
    with p.loop(begin, end) as block:
        for variables in block_sums:
            for variable in variables:
                variable.value = p.vector(0.0)
        steps = layout.steps_per_run
        accumulate_steps(weight, x, block * steps, (block + 1) * steps, block_sums, unpacked)
        for i, name in enumerate(("block_scale", "block_minimum")[: 1 + layout.minimum]):
            scale = weight.load_block(name, block)
            for row_sums, terms in zip(sums, block_sums, strict=True):
                row_sums[i].value = p.fma(terms[i].value, scale, row_sums[i].value)


def accumulate_steps(
    weight: WeightTile, x: list[SplitRow], begin: Value, end: Value, sums: RowSums, unpacked: UnpackedCodes | None
) -> None:
    """Add steps `begin` .. `end - 1`: code * scale * x, and minimum * x."""
    p, layout = weight.program, weight.layout
    with p.loop(begin, end) as step:
        for i, group_sums in enumerate(dot_groups(weight, x, step, unpacked)):
            group = step * layout.groups_per_step + i
            scale = weight.load_group("scale", group)
            for row, (x_row, (total, minimum)) in enumerate(zip(x, sums, strict=True)):
                s = x_row.load_record(group, 0, FLOAT)
                total.value = p.fma(join_digits(group_sums[row]), s * scale, total.value)
                if layout.minimum:
                    x_sum = x_row.load_record(group, 1, FLOAT)
                    minimum.value = p.fma(weight.load_group("minimum", group), x_sum, minimum.value)


GroupSums = list[list[list[Value]]]  # int32 vectors by group of a step, row of x, and sum of its `SplitFormat`


def dot_groups(weight: WeightTile, x: list[SplitRow], step: Value, unpacked: UnpackedCodes | None) -> GroupSums:
    """Integer sums of (code - zero point) * digit of x over each group of a step.

    They start at -(zero point) * (sum of digits), so that codes are multiplied as they are stored, unless the
    zero point was subtracted when they were unpacked.
    """
    p, layout, split = weight.program, weight.layout, x[0].split
    sums: GroupSums = []
    if unpacked:
        sums = [[[p.vector(0, INT)] * split.sums for _ in x] for _ in range(layout.groups_per_step)]
        return dot_words(layout, unpacked.load(weight, step), x, step, sums)
    # INT8 codes are shifted by 128 for instructions that take unsigned bytes.
    biased = layout.bits == 8 and p.multiplies_four_bytes and p.takes_unsigned_bytes
    for i in range(layout.groups_per_step):
        group = step * layout.groups_per_step + i
        zero = group_zero(weight, group)
        if biased:
            zero = zero + 128 if zero else p.vector(128, INT)
        if zero is None:
            sums.append([[p.vector(0, INT)] * split.sums for _ in x])
        else:
            sums.append(
                [
                    [p.vector(0, INT) - zero * row.load_record(group, 2 + k, INT) for k in range(split.sums)]
                    for row in x
                ]
            )
    if split.words:
        return dot_words(layout, widened_codes(weight, step), x, step, sums)
    dot = dot_planes if p.multiplies_four_bytes else dot_pairs_of_bytes
    return dot(weight, x, step, sums)


def group_zero(weight: WeightTile, group: Value) -> Value | None:
    """Return a group's zero point for each row, int32; None if codes have none."""
    if weight.layout.zero:
        return weight.load_zero(group)
    return weight.program.vector(weight.layout.zero_point, INT) if weight.layout.zero_point else None


def dot_planes(weight: WeightTile, x: list[SplitRow], step: Value, sums: GroupSums) -> GroupSums:
    """Multiply with instructions that add four byte products to int32."""
    p, layout = weight.program, weight.layout
    # Two accumulators hide the latency of the instruction, where registers hold them.
    count = 2 if len(x) == 1 or p.variant == "avx512vnni" else 1
    accumulators = [[[[digit, p.vector(0, INT)][:count] for digit in row] for row in group] for group in sums]
    row_pairs = range(len(x) // 2 if p.multiplies_byte_matrices else 0)
    matrices = RowPairProducts(x, {})
    for i, (column, codes) in enumerate(weight.load_codes(step)):
        if layout.bits == 8 and p.takes_unsigned_bytes:
            codes = codes ^ -0x7F7F7F80  # adds 128 to each byte
        if row_pairs:
            matrices.add(weight, step, column, codes)
        for row, x_row in [*enumerate(x)][2 * len(row_pairs) :]:
            for digit in range(len(x_row.digits)):
                chains = accumulators[column // layout.group][row][digit]
                four = x_row.load_columns(digit, step * layout.step_columns + column)
                chains[i % count] = p.pin(p.dot_bytes(chains[i % count], codes, four))
    for (group, pair, digit), halves in matrices.products.items():
        for row, lanes in enumerate(((0, 1), (2, 3))):
            # Of every four rows of W, the first half holds the products with two, the second those with the other
            # two.
            order = [4 * piece + lane + first for piece in range(4) for first in (0, LANES) for lane in lanes]
            accumulators[group][2 * pair + row][digit].append(p.shuffle(*halves, order))
    return [[[sum_values(chains) for chains in row] for row in group] for group in accumulators]


@dataclass
class RowPairProducts:
    """Products of two rows of x with 16 rows of W by an instruction for matrices of bytes."""

    x: list[SplitRow]
    waiting: dict[int, Value]  # codes by column, until those of the next four columns are loaded
    # 2 x 2 sums by group, pair of rows and digit: two rows of W of each four, then the other two
    products: dict[tuple[int, int, int], tuple[Value, Value]] = field(default_factory=dict)

    def add(self, weight: WeightTile, step: Value, column: int, codes: Value) -> None:
        """Add codes of four columns; every second call multiplies eight."""
        p, layout = weight.program, weight.layout
        if column % 8 == 0:
            self.waiting[column] = codes
            return
        first = self.waiting.pop(column - 4)
        # Four columns of each row beside the next four: rows 0 and 1 of each four, then rows 2 and 3.
        zipped = [
            p.shuffle(
                first, codes, [4 * piece + row + half for piece in range(4) for row in rows for half in (0, 16)]
            )
            for rows in ((0, 1), (2, 3))
        ]
        for pair in range(len(self.x) // 2):
            upper, lower = self.x[2 * pair], self.x[2 * pair + 1]
            for digit in range(len(upper.digits)):
                offset = step * layout.step_columns + (column - 4)
                eight = p.load_row_pair(upper.digits[digit], lower.digits[digit], offset)
                key = (column // layout.group, pair, digit)
                sums = self.products.get(key, (p.vector(0, INT), p.vector(0, INT)))
                first_sum, second_sum = (
                    p.matmul_bytes(total, eight, w) for total, w in zip(sums, zipped, strict=True)
                )
                self.products[key] = first_sum, second_sum


def dot_pairs_of_bytes(weight: WeightTile, x: list[SplitRow], step: Value, sums: GroupSums) -> GroupSums:
    """Multiply codes of 4 or 6 bits with instructions that add two byte products in int16."""
    p, layout, split = weight.program, weight.layout, x[0].split
    shorts: dict[tuple[int, int, int], tuple[Value, int]] = {}  # int16 sums and terms by group, row and digit

    def widen(key: tuple[int, int, int]) -> None:
        group, row, digit = key
        index, shift = split.sum_and_shift(digit)
        powers = p.as_shorts(p.vector(0x00010001 << shift, INT))
        sums[group][row][index] = sums[group][row][index] + p.dot_pairs(shorts.pop(key)[0], powers)

    for column, codes in weight.load_codes(step):
        for row, x_row in enumerate(x):
            for digit in range(len(x_row.digits)):
                key = (column // layout.group, row, digit)
                four = x_row.load_columns(digit, step * layout.step_columns + column)
                product = p.dot_byte_pairs(codes, four)
                total, terms = shorts.get(key, (None, 0))
                total = product if total is None else total + product
                shorts[key] = (p.as_shorts(p.pin(p.as_ints(total))) if len(x) > 1 else total, terms + 1)
                if terms + 1 == PAIRS_OF_16_BITS[layout.bits]:
                    widen(key)
    for key in list(shorts):
        widen(key)
    return sums


def sum_values(terms: list[Value]) -> Value:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def dot_words(
    layout: InterleavedLayout, codes: Iterator[tuple[int, Value]], x: list[SplitRow], step: Value, sums: GroupSums
) -> GroupSums:
    """Multiply codes, widened to int16, with instructions that add two int16 products."""
    for column, vector in codes:
        p = vector.program
        for row, x_row in enumerate(x):
            for digit in range(len(x_row.digits)):
                two = p.as_shorts(x_row.load_columns(digit, step * layout.step_columns + column))
                row_sums = sums[column // layout.group][row]
                row_sums[digit] = p.pin(row_sums[digit] + p.dot_pairs(vector, two))
    return sums


def widened_codes(weight: WeightTile, step: Value) -> Iterator[tuple[int, Value]]:
    """Codes of a step as int16, with the column of x (in the order of words) that each vector begins to meet."""
    p, layout = weight.program, weight.layout
    columns = iter(word_columns(layout))
    if layout.bits == 4:  # straight from nibbles
        for packed in weight.load_step(step):
            for shift in (0, 8, 4, 12):
                yield next(columns), p.extend_nibbles(packed, shift)
        return
    for _, codes in weight.load_codes(step):
        for pair in range(2):
            yield next(columns), p.extend_bytes(codes, pair, signed=layout.bits == 8)


def word_columns(layout: InterleavedLayout) -> list[int]:
    """Columns of `widened_codes`."""
    return [column + 2 * pair for column in layout.code_columns for pair in range(2)]


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
                for column, codes in weight.load_codes(step):
                    if column // layout.group != group:
                        continue
                    for byte in range(4):
                        code = extract_byte(codes, 8 * byte, signed=layout.bits == 8)
                        index = (step * layout.step_columns + column + byte) * tiles + tile
                        number = dequantize(code)
                        p.store_floats(number, ELEMENT_TYPES[out], panel, index * (LANES * out.itemsize))


def extract_byte(codes: Value, shift: int, *, signed: bool) -> Value:
    """Extract the byte at bit `shift` of each lane as int32."""
    return (codes << (24 - shift)).signed_shift(24) if signed else (codes >> shift) & 255


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

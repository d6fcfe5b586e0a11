"""The language that CPU kernels are written in: Python that lays out vector instructions, which LLVM compiles for
the processor at hand when a kernel is first needed. No compiler has to be installed, as for Triton.

A `Program` is a function `(arguments, part, parts)`: `arguments` are addresses and counts, and it does the
`part`-th of `parts` equal shares. Vectors have 16 lanes of 32 bits; LLVM cuts them to what the processor has.
Knows nothing of models and tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from llvmlite import ir

LANES = 16
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()
BFLOAT = "bfloat"  # LLVM's own type is not in llvmlite: the upper half of a float
Element = ir.Type | str


@dataclass(frozen=True)
class Value:
    """A number or a vector of 16, int32 or float32 unless it is an index (int64) or an address."""

    program: "Program"
    ir: Any

    @property
    def is_float(self) -> bool:
        return isinstance(getattr(self.ir.type, "element", self.ir.type), ir.FloatType)

    def operand(self, value: "Value | float") -> Any:
        if isinstance(value, Value):
            return value.ir
        kind = self.ir.type
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

    def wrap(self, made: Any) -> "Value":
        return Value(self.program, made)

    def __add__(self, value: "Value | float") -> "Value":
        b = self.program.builder
        return self.wrap((b.fadd if self.is_float else b.add)(self.ir, self.operand(value)))

    def __sub__(self, value: "Value | float") -> "Value":
        b = self.program.builder
        return self.wrap((b.fsub if self.is_float else b.sub)(self.ir, self.operand(value)))

    def __mul__(self, value: "Value | float") -> "Value":
        b = self.program.builder
        return self.wrap((b.fmul if self.is_float else b.mul)(self.ir, self.operand(value)))

    def __truediv__(self, value: "Value | float") -> "Value":
        b = self.program.builder
        return self.wrap((b.fdiv if self.is_float else b.sdiv)(self.ir, self.operand(value)))

    def __and__(self, value: "Value | int") -> "Value":
        return self.wrap(self.program.builder.and_(self.ir, self.operand(value)))

    def __or__(self, value: "Value | int") -> "Value":
        return self.wrap(self.program.builder.or_(self.ir, self.operand(value)))

    def __xor__(self, value: "Value | int") -> "Value":
        return self.wrap(self.program.builder.xor(self.ir, self.operand(value)))

    def __lshift__(self, bits: int) -> "Value":
        return self.wrap(self.program.builder.shl(self.ir, self.operand(bits)))

    def __rshift__(self, bits: int) -> "Value":
        """Zeros come in from above."""
        return self.wrap(self.program.builder.lshr(self.ir, self.operand(bits)))

    def signed_shift(self, bits: int) -> "Value":
        return self.wrap(self.program.builder.ashr(self.ir, self.operand(bits)))

    def to_float32(self) -> "Value":
        """Of int32, or one int64."""
        kind = vector_type(FLOAT) if isinstance(self.ir.type, ir.VectorType) else FLOAT
        return self.wrap(self.program.builder.sitofp(self.ir, kind))

    def round_to_int(self) -> "Value":
        """To the nearest int32, ties to even."""
        nearest = self.program.intrinsic("llvm.rint.v16f32", vector_type(FLOAT), self)
        return self.wrap(self.program.builder.fptosi(nearest.ir, vector_type(INT)))

    def broadcast(self) -> "Value":
        """One number in all lanes."""
        kind = vector_type(self.ir.type)
        first = self.program.builder.insert_element(ir.Constant(kind, ir.Undefined), self.ir, ir.Constant(INT, 0))
        lanes = ir.Constant(vector_type(INT), [0] * LANES)
        return self.wrap(self.program.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes))


@dataclass
class Variable:
    """What a loop changes."""

    program: "Program"
    pointer: Any
    dtype: ir.Type

    @property
    def value(self) -> Value:
        return Value(self.program, self.program.builder.load(self.pointer, typ=self.dtype))

    @value.setter
    def value(self, value: Value) -> None:
        self.program.builder.store(value.ir, self.pointer)


# Instructions for products of bytes, as LLVM's intrinsics, and the bits of the vectors that they take.
FOUR_BYTES = {  # int32 + the sum of four products of bytes
    "avx512vnni": ("llvm.x86.avx512.vpdpbusd.512", 512),
    "avxvnni": ("llvm.x86.avx512.vpdpbusd.256", 256),
    "dotprod": ("llvm.aarch64.neon.sdot.v4i32.v16i8", 128),
}
BYTE_PAIRS = {  # int16, saturated: the sum of two products of bytes
    "avx512bw": ("llvm.x86.avx512.pmaddubs.w.512", 512),
    "avx2": ("llvm.x86.avx2.pmadd.ub.sw", 256),
}
SHORT_PAIRS = {  # int32: the sum of two products of int16
    "avx512bw": ("llvm.x86.avx512.pmaddw.d.512", 512),
    "avx2": ("llvm.x86.avx2.pmadd.wd", 256),
}
VECTOR_BITS = 512  # 16 lanes of 32


class Program:
    def __init__(self, name: str, variant: str):
        """variant: how the processor multiplies bytes (`hardware.processor.BYTE_PRODUCTS`)."""
        self.name = name
        self.variant = variant
        self.module = ir.Module(name)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [POINTER, LONG, LONG]), name)
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        arguments, part, parts = self.function.args
        self.arguments = Value(self, arguments)
        self.part, self.parts = Value(self, part), Value(self, parts)
        self.long = LONG

    def to_llvm(self) -> str:
        """The program in LLVM's own words."""
        self.builder.ret_void()
        return str(self.module)

    def load_addresses(self, count: int, begin: int = 0) -> list[Value]:
        return [self.load(POINTER, self.arguments, 8 * i) for i in range(begin, begin + count)]

    def load_counts(self, count: int, begin: int) -> list[Value]:
        return [self.load(LONG, self.arguments, 8 * i) for i in range(begin, begin + count)]

    def intrinsic(self, name: str, kind: ir.Type, *arguments: Value) -> Value:
        """One of LLVM's intrinsics."""
        signature = ir.FunctionType(kind, [a.ir.type for a in arguments])
        found = self.module.globals.get(name) or ir.Function(self.module, signature, name)
        return Value(self, self.builder.call(found, [a.ir for a in arguments]))

    def index_constant(self, number: int) -> Value:
        return Value(self, ir.Constant(LONG, number))

    def float_constant(self, number: float) -> Value:
        return Value(self, ir.Constant(FLOAT, number))

    def vector(self, number: float, kind: ir.Type = FLOAT) -> Value:
        """The same number in all lanes."""
        return Value(self, ir.Constant(vector_type(kind), [number] * LANES))

    def variable(self, start: Value) -> Variable:
        with self.builder.goto_entry_block():
            place = self.builder.alloca(start.ir.type)
        made = Variable(self, place, start.ir.type)
        made.value = start
        return made

    @contextmanager
    def loop(self, begin: Value, end: Value, step: int = 1) -> Iterator[Value]:
        at = self.variable(begin)
        head, body, after = (self.builder.append_basic_block() for _ in range(3))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        now = at.value
        self.builder.cbranch(self.builder.icmp_signed("<", now.ir, end.ir), body, after)
        self.builder.position_at_end(body)
        yield now
        at.value = now + step
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def part_range(self, count: Value) -> tuple[Value, Value]:
        """Begin and end of this part's share of 0 .. count - 1."""
        return count * self.part / self.parts, count * (self.part + 1) / self.parts

    def address(self, address: Value, offset: Value | int) -> Value:
        """The address some bytes on."""
        offset = offset if isinstance(offset, Value) else self.index_constant(offset)
        return Value(self, self.builder.gep(address.ir, [offset.ir], source_etype=BYTE))

    def load(self, kind: ir.Type, address: Value, offset: Value | int = 0) -> Value:
        return Value(self, self.builder.load(self.address(address, offset).ir, typ=kind, align=1))

    def load_floats(self, kind: Element, address: Value, offset: Value | int = 0) -> Value:
        """16 numbers of another type, as float32."""
        if kind == BFLOAT:
            wide = self.builder.zext(self.load(vector_type(SHORT), address, offset).ir, vector_type(INT))
            return Value(self, self.builder.bitcast((Value(self, wide) << 16).ir, vector_type(FLOAT)))
        found = self.load(vector_type(kind), address, offset)
        return found if kind == FLOAT else Value(self, self.builder.fpext(found.ir, vector_type(FLOAT)))

    def load_bytes(self, address: Value, offset: Value | int, signed: bool) -> Value:
        """16 bytes, as int32."""
        found = self.load(vector_type(BYTE), address, offset).ir
        return Value(self, (self.builder.sext if signed else self.builder.zext)(found, vector_type(INT)))

    def load_signed_bytes(self, address: Value, count: int) -> Value:
        """`count` signed bytes as int32, the rest zero."""
        if count == LANES:
            return self.load_bytes(address, 0, signed=True)
        found = self.masked_load(BYTE, LANES, address, self.index_constant(count)).ir
        return Value(self, self.builder.sext(found, vector_type(INT)))

    def load_broadcast(self, kind: ir.Type, address: Value, offset: Value | int) -> Value:
        return self.load(kind, address, offset).broadcast()

    def load_first(self, kind: Element, address: Value, count: Value) -> Value:
        """As many of 16 numbers of another type, as float32, the rest zero; no byte behind them is read."""
        if kind == BFLOAT:
            wide = self.builder.zext(self.masked_load(SHORT, LANES, address, count).ir, vector_type(INT))
            return self.bitcast_float(Value(self, wide) << 16)
        assert isinstance(kind, ir.Type)
        found = self.masked_load(kind, LANES, address, count)
        return found if kind == FLOAT else Value(self, self.builder.fpext(found.ir, vector_type(FLOAT)))

    def load_pairs(self, address: Value, count: Value | None = None) -> Value:
        """32 numbers of 16 bits in 16 int32, or as many of them as `count`, the rest zero."""
        if count is None:
            return self.load(vector_type(INT), address)
        found = self.masked_load(SHORT, 2 * LANES, address, count)
        return Value(self, self.builder.bitcast(found.ir, vector_type(INT)))

    def masked_load(self, kind: ir.Type, lanes: int, address: Value, count: Value) -> Value:
        """The first `count` lanes of a vector, the rest zero; no byte behind them is read."""
        wanted = ir.VectorType(kind, lanes)
        zero = Value(self, ir.Constant(wanted, [0] * lanes))
        name = f"llvm.masked.load.v{lanes}{intrinsic_suffix(kind)}.p0"
        return self.intrinsic(
            name, wanted, address, Value(self, ir.Constant(INT, 1)), self.first_lanes_mask(count, lanes), zero
        )

    def first_lanes_mask(self, count: Value, lanes: int = LANES) -> Value:
        """Of each lane, whether it is among the first."""
        kind = ir.VectorType(INT, lanes)
        none = ir.Constant(kind, ir.Undefined)
        limit = self.builder.insert_element(none, self.builder.trunc(count.ir, INT), ir.Constant(INT, 0))
        limit = self.builder.shuffle_vector(limit, none, ir.Constant(kind, [0] * lanes))
        return Value(self, self.builder.icmp_signed("<", ir.Constant(kind, list(range(lanes))), limit))

    def bitcast_float(self, bits: Value) -> Value:
        """int32 with the same bits -> float32"""
        return Value(self, self.builder.bitcast(bits.ir, vector_type(FLOAT)))

    def store(self, value: Value, address: Value, offset: Value | int = 0) -> None:
        self.builder.store(value.ir, self.address(address, offset).ir, align=1)

    def store_floats(self, value: Value, kind: Element, address: Value, offset: Value | int = 0) -> None:
        """16 float32, rounded to another type."""
        self.store(self.convert(value, kind), address, offset)

    def store_first(self, value: Value, kind: Element, address: Value, offset: Value | int, count: Value) -> None:
        """As many of 16 float32, rounded to another type; no byte behind them is touched."""
        made = self.convert(value, kind)
        name = f"llvm.masked.store.v{LANES}{intrinsic_suffix(made.ir.type.element)}.p0"
        where = (self.address(address, offset), Value(self, ir.Constant(INT, 1)), self.first_lanes_mask(count))
        self.intrinsic(name, ir.VoidType(), made, *where)

    def convert(self, value: Value, kind: Element) -> Value:
        """16 float32 as another type."""
        if kind == FLOAT:
            return value
        if isinstance(kind, ir.Type):
            return Value(self, self.builder.fptrunc(value.ir, vector_type(kind)))
        bits = Value(self, self.builder.bitcast(value.ir, vector_type(INT)))
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        found = self.builder.trunc(nearest.ir, vector_type(SHORT))
        # What is NaN stays so: adding to it may carry into the sign.
        nan = self.builder.fcmp_unordered("uno", value.ir, value.ir)
        return Value(self, self.builder.select(nan, ir.Constant(vector_type(SHORT), [0x7FC0] * LANES), found))

    def store_float(self, value: Value, kind: Element, address: Value, offset: Value | int = 0) -> None:
        """One float32, rounded to another type."""
        first = self.builder.extract_element(self.convert(value.broadcast(), kind).ir, ir.Constant(INT, 0))
        self.store(Value(self, first), address, offset)

    def store_bytes(self, value: Value, address: Value, offset: Value | int) -> None:
        """The lowest byte of each lane."""
        self.store(Value(self, self.builder.trunc(value.ir, vector_type(BYTE))), address, offset)

    def store_digits(self, value: Value, address: Value, offset: Value, words: bool) -> None:
        """The lowest byte of each lane; or the lowest word, of each four lanes 0, 2, 1, 3."""
        if not words:
            return self.store_bytes(value, address, offset)
        order = [lane + i for lane in range(0, LANES, 4) for i in (0, 2, 1, 3)]
        self.store(self.truncate_shorts(value, order), address, offset)

    def prefetch(self, address: Value, offset: int) -> None:
        """Into the second cache: `offset` bytes ahead."""
        how = (Value(self, ir.Constant(INT, n)) for n in (0, 2, 1))
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), self.address(address, offset), *how)

    def prefetch_bytes(self, address: Value, offset: Value, count: int) -> None:
        """`count` bytes from there on."""
        for line in range(0, count, 64):
            self.prefetch(self.address(address, offset), line)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.intrinsic("llvm.fma.v16f32", vector_type(FLOAT), a, b, c)

    def maxnum(self, a: Value, b: Value) -> Value:
        """Of what is NaN and what is not, what is not."""
        return self.intrinsic("llvm.maxnum.v16f32", vector_type(FLOAT), a, b)

    def minnum(self, a: Value, b: Value) -> Value:
        """Of what is NaN and what is not, what is not."""
        return self.intrinsic("llvm.minnum.v16f32", vector_type(FLOAT), a, b)

    def propagate_nan(self, a: Value, b: Value) -> Value:
        """b where a is a number, else a."""
        nan = self.builder.fcmp_unordered("uno", a.ir, a.ir)
        return Value(self, self.builder.select(nan, a.ir, b.ir))

    def select_negative(self, a: Value, b: Value, c: Value) -> Value:
        """b where a is below 0, else c."""
        below = self.builder.fcmp_ordered("<", a.ir, ir.Constant(vector_type(FLOAT), [0.0] * LANES))
        return Value(self, self.builder.select(below, b.ir, c.ir))

    def shuffle(self, a: Value, b: Value, lanes: list[int]) -> Value:
        """Those lanes of both, b's counted from 16."""
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, ir.Constant(vector_type(INT), lanes)))

    def select_lanes(self, a: Value, begin: Value, end: Value, other: Value) -> Value:
        """a in the lanes from index `begin` to `end` - 1, else the other."""
        b = self.builder
        lanes = ir.Constant(vector_type(INT), list(range(LANES)))
        low, high = (Value(self, b.trunc(each.ir, INT)).broadcast().ir for each in (begin, end))
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        return Value(self, b.select(inside, a.ir, other.ir))

    def select_nonzero(self, condition: Value, a: Value, b: Value) -> Value:
        """a where an index is not 0, else b."""
        zero = ir.Constant(LONG, 0)
        return Value(self, self.builder.select(self.builder.icmp_signed("!=", condition.ir, zero), a.ir, b.ir))

    def min_index(self, a: Value, b: Value) -> Value:
        """The smaller of two indices."""
        return Value(self, self.builder.select(self.builder.icmp_signed("<", a.ir, b.ir), a.ir, b.ir))

    def max_index(self, a: Value, b: Value) -> Value:
        """The larger of two indices."""
        return Value(self, self.builder.select(self.builder.icmp_signed(">", a.ir, b.ir), a.ir, b.ir))

    def insert_lane(self, a: Value, lane: int, number: Value) -> Value:
        """a with another number in one lane."""
        return Value(self, self.builder.insert_element(a.ir, number.ir, ir.Constant(INT, lane)))

    def modulo(self, a: Value, divisor: int) -> Value:
        """Of an index that is no less than 0."""
        return a - a / divisor * divisor

    def extend_short(self, a: Value) -> Value:
        """16 bits -> int32, with zeros above"""
        return Value(self, self.builder.zext(a.ir, INT))

    def extend_index(self, a: Value) -> Value:
        """int32 -> an index"""
        return Value(self, self.builder.sext(a.ir, LONG))

    def absolute(self, a: Value) -> Value:
        return self.intrinsic("llvm.fabs.v16f32", vector_type(FLOAT), a)

    def reduce_max(self, a: Value) -> Value:
        """The largest number of 16."""
        return self.intrinsic("llvm.vector.reduce.fmax.v16f32", FLOAT, a)

    def reduce_sum_int(self, a: Value) -> Value:
        """The sum of 16 int32."""
        return self.intrinsic("llvm.vector.reduce.add.v16i32", INT, a)

    def reduce_sum(self, a: Value) -> Value:
        """Of 16 float32, added in pairs."""
        distance = LANES // 2
        while distance:
            lanes = [(lane + distance) % LANES for lane in range(LANES)]
            moved = self.builder.shuffle_vector(a.ir, a.ir, ir.Constant(vector_type(INT), lanes))
            a, distance = a + Value(self, moved), distance // 2
        return Value(self, self.builder.extract_element(a.ir, ir.Constant(INT, 0)))

    def sqrt(self, a: Value) -> Value:
        """Of one number."""
        return self.intrinsic("llvm.sqrt.f32", FLOAT, a)

    def reduce_nan(self, a: Value) -> Value:
        """Of 16 numbers that are zero or NaN: zero, or NaN."""
        bits = Value(self, self.builder.bitcast(a.ir, vector_type(INT)))
        return Value(
            self, self.builder.bitcast(self.intrinsic("llvm.vector.reduce.or.v16i32", INT, bits).ir, FLOAT)
        )

    @property
    def multiplies_four_bytes(self) -> bool:
        """Has the processor an instruction for `dot_bytes`?"""
        return self.variant in FOUR_BYTES

    @property
    def takes_unsigned_bytes(self) -> bool:
        """Is the first operand of `dot_bytes` unsigned?"""
        return self.variant != "dotprod"

    def dot_bytes(self, into: Value, a: Value, b: Value) -> Value:
        """Add to each int32 the products of its four bytes: those of a 0 .. 255 (ARM: -128 .. 127), those of b
        -128 .. 127."""
        return self.intrinsic_by_pieces(*FOUR_BYTES[self.variant], [INT, BYTE, BYTE], INT, into, a, b)

    def dot_byte_pairs(self, unsigned: Value, signed: Value) -> Value:
        """64 bytes each -> 32 int16, u[2i] * s[2i] + u[2i + 1] * s[2i + 1]: sums beyond 16 bits are undefined."""
        if self.variant in BYTE_PAIRS:
            return self.intrinsic_by_pieces(*BYTE_PAIRS[self.variant], [BYTE, BYTE], SHORT, unsigned, signed)
        u, (even, odd) = self.as_shorts(unsigned), self.extend_byte_pairs(signed)
        return (u & 255) * even + (u >> 8) * odd

    def extend_byte_pairs(self, a: Value) -> tuple[Value, Value]:
        """64 signed bytes -> 32 int16 each: the even ones, the odd ones."""
        shorts = self.as_shorts(a)
        return (shorts << 8).signed_shift(8), shorts.signed_shift(8)

    def as_shorts(self, a: Value) -> Value:
        """The same bits as 32 int16."""
        return Value(self, self.builder.bitcast(a.ir, ir.VectorType(SHORT, 2 * LANES)))

    def truncate_shorts(self, a: Value, lanes: list[int]) -> Value:
        """16 int32 -> the lowest 16 bits of these lanes."""
        shorts = self.builder.trunc(a.ir, vector_type(SHORT))
        return Value(self, self.builder.shuffle_vector(shorts, shorts, ir.Constant(vector_type(INT), lanes)))

    def intrinsic_by_pieces(
        self, name: str, bits: int, kinds: list[ir.IntType], result: ir.IntType, *vectors: Value
    ) -> Value:
        """An intrinsic that takes vectors of `bits`, over vectors of 512; kinds: of their elements."""
        b, pieces, lanes = self.builder, VECTOR_BITS // bits, LANES * bits // VECTOR_BITS
        words = [b.bitcast(vector.ir, vector_type(INT)) for vector in vectors]
        results = []
        for piece in range(pieces):
            mask = ir.Constant(ir.VectorType(INT, lanes), list(range(piece * lanes, (piece + 1) * lanes)))
            cut = [word if pieces == 1 else b.shuffle_vector(word, word, mask) for word in words]
            operands = [b.bitcast(v, vector_of(kind, bits)) for v, kind in zip(cut, kinds, strict=True)]
            one = self.intrinsic(name, vector_of(result, bits), *(Value(self, operand) for operand in operands))
            results.append(b.bitcast(one.ir, ir.VectorType(INT, lanes)))
        while len(results) > 1:
            lanes *= 2
            mask = ir.Constant(ir.VectorType(INT, lanes), list(range(lanes)))
            results = [b.shuffle_vector(*two, mask) for two in zip(results[::2], results[1::2], strict=True)]
        return Value(self, b.bitcast(results[0], vector_of(result, VECTOR_BITS)))

    def dot_pairs(self, a: Value, b: Value) -> Value:
        """32 int16 each -> 16 int32, a[2i] * b[2i] + a[2i + 1] * b[2i + 1]."""
        if self.variant in SHORT_PAIRS:
            return self.intrinsic_by_pieces(*SHORT_PAIRS[self.variant], [SHORT, SHORT], INT, a, b)
        product = None
        for first in (0, 1):
            lanes = ir.Constant(vector_type(INT), list(range(first, 2 * LANES, 2)))
            x, y = (
                self.builder.sext(self.builder.shuffle_vector(v.ir, v.ir, lanes), vector_type(INT)) for v in (a, b)
            )
            one = Value(self, self.builder.mul(x, y))
            product = one if product is None else product + one
        assert product is not None
        return product


def intrinsic_suffix(kind: ir.Type) -> str:
    """As LLVM has it in the names of intrinsics."""
    return {"float": "f32", "half": "f16"}.get(str(kind), str(kind))


def vector_type(kind: Any) -> ir.VectorType:
    return ir.VectorType(kind, LANES)


def vector_of(kind: ir.IntType, bits: int) -> ir.VectorType:
    """As many integers as `bits` hold."""
    return ir.VectorType(kind, bits // cast(ir.IntType, kind).width)

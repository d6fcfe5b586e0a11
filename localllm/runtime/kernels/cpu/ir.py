"""Builder of LLVM IR for CPU kernels: Python code that emits vector instructions.

LLVM compiles a kernel for the processor at hand when it is first called, so no compiler has to be installed. A
`Program` builds one function `(arguments, part, parts)`: `arguments` is an array of int64 (addresses and counts),
and the call computes share `part` of `parts` equal shares. Vectors have 16 lanes of 32 bits; LLVM splits them into
the vectors of the processor. Nothing here depends on models or tensors.
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
BFLOAT = "bfloat"  # llvmlite lacks LLVM's type: handled as the upper 16 bits of a float
Element = ir.Type | str  # element type of numbers in memory


@dataclass(frozen=True)
class Value:
    """SSA value: a scalar or a vector of 16 lanes of int32 or float32, an index (int64), or an address."""

    program: "Program"
    ir: Any

    @property
    def is_float(self) -> bool:
        return isinstance(getattr(self.ir.type, "element", self.ir.type), ir.FloatType)

    def operand(self, value: "Value | float") -> Any:
        if isinstance(value, Value):
            return value.ir
        own = self.ir.type
        return ir.Constant(own, [value] * own.count if isinstance(own, ir.VectorType) else value)

    def wrap(self, instruction: Any) -> "Value":
        return Value(self.program, instruction)

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
        """Logical shift: zeros fill the upper bits."""
        return self.wrap(self.program.builder.lshr(self.ir, self.operand(bits)))

    def signed_shift(self, bits: int) -> "Value":
        """Arithmetic shift to the right."""
        return self.wrap(self.program.builder.ashr(self.ir, self.operand(bits)))

    def to_float32(self) -> "Value":
        """Convert a vector of int32, or a scalar integer, to float32."""
        target = vector_type(FLOAT) if isinstance(self.ir.type, ir.VectorType) else FLOAT
        return self.wrap(self.program.builder.sitofp(self.ir, target))

    def round_to_int(self) -> "Value":
        """Round a vector of float32 to the nearest int32, ties to even."""
        nearest = self.program.intrinsic("llvm.rint.v16f32", vector_type(FLOAT), self)
        return self.wrap(self.program.builder.fptosi(nearest.ir, vector_type(INT)))

    def broadcast(self) -> "Value":
        """Copy a scalar to all lanes."""
        undefined = ir.Constant(vector_type(self.ir.type), ir.Undefined)
        first = self.program.builder.insert_element(undefined, self.ir, ir.Constant(INT, 0))
        lanes = ir.Constant(vector_type(INT), [0] * LANES)
        return self.wrap(self.program.builder.shuffle_vector(first, undefined, lanes))


@dataclass
class Variable:
    """Stack slot of a value that a loop updates; LLVM turns it into a register."""

    program: "Program"
    pointer: Any
    dtype: ir.Type

    @property
    def value(self) -> Value:
        return Value(self.program, self.program.builder.load(self.pointer, typ=self.dtype))

    @value.setter
    def value(self, value: Value) -> None:
        self.program.builder.store(value.ir, self.pointer)


# LLVM intrinsics of integer dot products by instruction set, and the width of their vectors in bits.
FOUR_BYTES = {  # int32 accumulator + the sum of four products of bytes
    "avx512vnni": ("llvm.x86.avx512.vpdpbusd.512", 512),
    "avxvnni": ("llvm.x86.avx512.vpdpbusd.256", 256),
    "i8mm": ("llvm.aarch64.neon.sdot.v4i32.v16i8", 128),
    "dotprod": ("llvm.aarch64.neon.sdot.v4i32.v16i8", 128),
}
BYTE_MATRICES = {  # int32 2 x 2 accumulator + the products of two rows of eight bytes with two others
    "i8mm": ("llvm.aarch64.neon.smmla.v4i32.v16i8", 128),
}
BYTE_PAIRS = {  # int16, saturating: the sum of two products of bytes
    "avx512bw": ("llvm.x86.avx512.pmaddubs.w.512", 512),
    "avx2": ("llvm.x86.avx2.pmadd.ub.sw", 256),
}
SHORT_PAIRS = {  # int32: the sum of two products of int16
    "avx512bw": ("llvm.x86.avx512.pmaddw.d.512", 512),
    "avx2": ("llvm.x86.avx2.pmadd.wd", 256),
}
VECTOR_BITS = 512  # 16 lanes of 32 bits
# Inline assembly constraint of a vector register, and its width, where 16 registers hold the sums of a kernel.
FEW_REGISTERS = {"avxvnni": ("x", 256), "avx2": ("x", 256)}


class Program:
    def __init__(self, name: str, variant: str):
        """variant: byte product instructions of the processor (`hardware.processor.BYTE_PRODUCTS`)."""
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
        """End the function and return its LLVM IR as text."""
        self.builder.ret_void()
        return str(self.module)

    def load_addresses(self, count: int, begin: int = 0) -> list[Value]:
        """Load arguments `begin` .. `begin + count - 1` as addresses."""
        return [self.load(POINTER, self.arguments, 8 * i) for i in range(begin, begin + count)]

    def load_counts(self, count: int, begin: int) -> list[Value]:
        """Load arguments `begin` .. `begin + count - 1` as int64."""
        return [self.load(LONG, self.arguments, 8 * i) for i in range(begin, begin + count)]

    def intrinsic(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """Call an LLVM intrinsic that returns `result`."""
        signature = ir.FunctionType(result, [a.ir.type for a in arguments])
        function = self.module.globals.get(name) or ir.Function(self.module, signature, name)
        return Value(self, self.builder.call(function, [a.ir for a in arguments]))

    def index_constant(self, number: int) -> Value:
        return Value(self, ir.Constant(LONG, number))

    def float_constant(self, number: float) -> Value:
        return Value(self, ir.Constant(FLOAT, number))

    def vector(self, number: float, element: ir.Type = FLOAT) -> Value:
        """Constant vector with `number` in all lanes."""
        return Value(self, ir.Constant(vector_type(element), [number] * LANES))

    def lanes(self, numbers: list[float]) -> Value:
        """Constant vector of 16 float32."""
        return Value(self, ir.Constant(vector_type(FLOAT), numbers))

    def variable(self, start: Value) -> Variable:
        with self.builder.goto_entry_block():
            pointer = self.builder.alloca(start.ir.type)
        variable = Variable(self, pointer, start.ir.type)
        variable.value = start
        return variable

    def stack_buffer(self, size: int) -> Value:
        """Return the address of `size` uninitialized bytes on the stack, at the start of a cache line."""
        with self.builder.goto_entry_block():
            buffer: Any = self.builder.alloca(ir.ArrayType(BYTE, size))
        buffer.align = 64
        buffer.type = POINTER  # llvmlite would keep the type of what it points to
        return Value(self, buffer)

    @contextmanager
    def loop(self, begin: Value, end: Value, step: int = 1) -> Iterator[Value]:
        """Emit the body of the `with` block as a loop over begin, begin + step, ... < end."""
        counter = self.variable(begin)
        head, body, after = (self.builder.append_basic_block() for _ in range(3))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = counter.value
        self.builder.cbranch(self.builder.icmp_signed("<", index.ir, end.ir), body, after)
        self.builder.position_at_end(body)
        yield index
        counter.value = index + step
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def part_range(self, count: Value) -> tuple[Value, Value]:
        """Return begin and end of this part's share of 0 .. count - 1."""
        return count * self.part / self.parts, count * (self.part + 1) / self.parts

    def address(self, address: Value, offset: Value | int) -> Value:
        """Return `address` plus `offset` bytes."""
        offset = offset if isinstance(offset, Value) else self.index_constant(offset)
        return Value(self, self.builder.gep(address.ir, [offset.ir], source_etype=BYTE))

    def load(self, dtype: ir.Type, address: Value, offset: Value | int = 0) -> Value:
        """Load one value of an IR type, unaligned."""
        return Value(self, self.builder.load(self.address(address, offset).ir, typ=dtype, align=1))

    def load_floats(self, element: Element, address: Value, offset: Value | int = 0) -> Value:
        """Load 16 numbers and convert them to float32."""
        if element == BFLOAT:
            wide = self.builder.zext(self.load(vector_type(SHORT), address, offset).ir, vector_type(INT))
            return self.bitcast_float(Value(self, wide) << 16)
        numbers = self.load(vector_type(element), address, offset)
        return numbers if element == FLOAT else Value(self, self.builder.fpext(numbers.ir, vector_type(FLOAT)))

    def load_bytes(self, address: Value, offset: Value | int, signed: bool) -> Value:
        """Load 16 bytes and extend them to int32."""
        loaded = self.load(vector_type(BYTE), address, offset).ir
        return Value(self, (self.builder.sext if signed else self.builder.zext)(loaded, vector_type(INT)))

    def load_signed_bytes(self, address: Value, count: int) -> Value:
        """Load `count` signed bytes as int32; the other lanes are zero."""
        if count == LANES:
            return self.load_bytes(address, 0, signed=True)
        loaded = self.masked_load(BYTE, LANES, address, self.index_constant(count)).ir
        return Value(self, self.builder.sext(loaded, vector_type(INT)))

    def load_nibbles(self, address: Value, count: int) -> Value:
        """Load an even `count` of signed 4-bit integers as int32, the lower half of a byte first; the other lanes
        are zero.
        """
        half = LANES // 2
        if count == LANES:
            loaded = self.load(ir.VectorType(BYTE, half), address)
        else:
            loaded = self.masked_load(BYTE, half, address, self.index_constant(count // 2))
        twice = ir.Constant(vector_type(INT), [lane // 2 for lane in range(LANES)])
        wide = self.builder.zext(self.builder.shuffle_vector(loaded.ir, loaded.ir, twice), vector_type(INT))
        upper = ir.Constant(vector_type(INT), [28, 24] * half)  # moves each code to the highest 4 bits
        return Value(self, self.builder.shl(wide, upper)).signed_shift(28)

    def load_broadcast(self, dtype: ir.Type, address: Value, offset: Value | int) -> Value:
        """Load one number into all lanes."""
        return self.load(dtype, address, offset).broadcast()

    def gather(self, dtype: ir.IntType, addresses: list[Value], offset: int) -> Value:
        """Load one integer from `offset` bytes behind each of 16 addresses."""
        vector = ir.Constant(vector_type(dtype), ir.Undefined)
        for lane, address in enumerate(addresses):
            vector = self.builder.insert_element(
                vector, self.load(dtype, address, offset).ir, ir.Constant(INT, lane)
            )
        return Value(self, vector)

    def load_first(self, element: Element, address: Value, count: Value) -> Value:
        """Load `count` numbers as float32; the other lanes are zero and their bytes are not read."""
        if element == BFLOAT:
            wide = self.builder.zext(self.masked_load(SHORT, LANES, address, count).ir, vector_type(INT))
            return self.bitcast_float(Value(self, wide) << 16)
        assert isinstance(element, ir.Type)
        numbers = self.masked_load(element, LANES, address, count)
        return numbers if element == FLOAT else Value(self, self.builder.fpext(numbers.ir, vector_type(FLOAT)))

    def load_elements(self, element: Element, address: Value, begin: int, count: int) -> Value:
        """Load up to 16 numbers of a row from index `begin` as float32; lanes from `count` on are zero."""
        offset = begin * element_bytes(element)
        if count >= LANES:
            return self.load_floats(element, address, offset)
        return self.load_first(element, self.address(address, offset), self.index_constant(count))

    def store_elements(self, value: Value, element: Element, address: Value, begin: int, count: int) -> None:
        """Store up to 16 float32 at index `begin` of a row, rounded to its element type."""
        offset = begin * element_bytes(element)
        if count >= LANES:
            self.store_floats(value, element, address, offset)
        else:
            self.store_first(value, element, address, offset, self.index_constant(count))

    def load_pairs(self, address: Value, count: Value | None = None) -> Value:
        """Load 32 numbers of 16 bits as 16 int32, or the first `count` of them and zeros."""
        if count is None:
            return self.load(vector_type(INT), address)
        loaded = self.masked_load(SHORT, 2 * LANES, address, count)
        return Value(self, self.builder.bitcast(loaded.ir, vector_type(INT)))

    def masked_load(self, element: ir.Type, lanes: int, address: Value, count: Value) -> Value:
        """Load the first `count` lanes of a vector; the others are zero and their bytes are not read."""
        vector = ir.VectorType(element, lanes)
        zero = Value(self, ir.Constant(vector, [0] * lanes))
        name = f"llvm.masked.load.v{lanes}{intrinsic_suffix(element)}.p0"
        return self.intrinsic(
            name, vector, address, Value(self, ir.Constant(INT, 1)), self.first_lanes_mask(count, lanes), zero
        )

    def first_lanes_mask(self, count: Value, lanes: int = LANES) -> Value:
        """Return a vector of booleans: lane index < `count`."""
        vector = ir.VectorType(INT, lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        limit = self.builder.insert_element(undefined, self.builder.trunc(count.ir, INT), ir.Constant(INT, 0))
        limit = self.builder.shuffle_vector(limit, undefined, ir.Constant(vector, [0] * lanes))
        return Value(self, self.builder.icmp_signed("<", ir.Constant(vector, list(range(lanes))), limit))

    def bitcast_float(self, bits: Value) -> Value:
        """Reinterpret the bits of int32 as float32."""
        return Value(self, self.builder.bitcast(bits.ir, vector_type(FLOAT)))

    def store(self, value: Value, address: Value, offset: Value | int = 0) -> None:
        self.builder.store(value.ir, self.address(address, offset).ir, align=1)

    def store_floats(self, value: Value, element: Element, address: Value, offset: Value | int = 0) -> None:
        """Store 16 float32, rounded to `element`."""
        self.store(self.convert(value, element), address, offset)

    def store_first(
        self, value: Value, element: Element, address: Value, offset: Value | int, count: Value
    ) -> None:
        """Store the first `count` lanes, rounded to `element`; the bytes behind them stay untouched."""
        numbers = self.convert(value, element)
        name = f"llvm.masked.store.v{LANES}{intrinsic_suffix(numbers.ir.type.element)}.p0"
        target = (self.address(address, offset), Value(self, ir.Constant(INT, 1)), self.first_lanes_mask(count))
        self.intrinsic(name, ir.VoidType(), numbers, *target)

    def convert(self, value: Value, element: Element) -> Value:
        """Round 16 float32 to `element`, to nearest even; bfloat16 as int16."""
        if element == FLOAT:
            return value
        if isinstance(element, ir.Type):
            return Value(self, self.builder.fptrunc(value.ir, vector_type(element)))
        bits = Value(self, self.builder.bitcast(value.ir, vector_type(INT)))
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = self.builder.trunc(nearest.ir, vector_type(SHORT))
        # NaN is selected apart: the addition may carry into its sign bit.
        nan = self.builder.fcmp_unordered("uno", value.ir, value.ir)
        return Value(self, self.builder.select(nan, ir.Constant(vector_type(SHORT), [0x7FC0] * LANES), rounded))

    def round_to(self, value: Value, element: Element) -> Value:
        """Round 16 float32 to numbers that `element` has."""
        rounded = self.convert(value, element)
        if element == BFLOAT:
            return self.bitcast_float(Value(self, self.builder.zext(rounded.ir, vector_type(INT))) << 16)
        return rounded if element == FLOAT else Value(self, self.builder.fpext(rounded.ir, vector_type(FLOAT)))

    def store_nibbles(self, codes: list[Value], address: Value) -> None:
        """Store the lowest 4 bits of the lanes of one or two vectors of int32, of two lanes in a byte."""
        first, second = codes[0], codes[-1]
        even, odd = (self.shuffle(first, second, list(range(i, 2 * LANES, 2))) for i in (0, 1))
        pairs = self.builder.trunc(((even & 15) | (odd << 4)).ir, vector_type(BYTE))
        count = len(codes) * LANES // 2
        kept = ir.Constant(ir.VectorType(INT, count), list(range(count)))
        self.store(Value(self, self.builder.shuffle_vector(pairs, pairs, kept)), address)

    def store_float(self, value: Value, element: Element, address: Value, offset: Value | int = 0) -> None:
        """Store one float32, rounded to `element`."""
        first = self.builder.extract_element(self.convert(value.broadcast(), element).ir, ir.Constant(INT, 0))
        self.store(Value(self, first), address, offset)

    def store_bytes(self, value: Value, address: Value, offset: Value | int) -> None:
        """Store the lowest byte of each lane."""
        self.store(Value(self, self.builder.trunc(value.ir, vector_type(BYTE))), address, offset)

    def store_digits(self, value: Value, address: Value, offset: Value, words: bool) -> None:
        """Store the lowest byte of each lane; with `words` the lowest 16 bits, each four lanes as 0, 2, 1, 3."""
        if not words:
            return self.store_bytes(value, address, offset)
        order = [lane + i for lane in range(0, LANES, 4) for i in (0, 2, 1, 3)]
        self.store(self.truncate_shorts(value, order), address, offset)

    def prefetch(self, address: Value, offset: int) -> None:
        """Prefetch the cache line at `offset` bytes for reading, into the L2 cache."""
        how = (Value(self, ir.Constant(INT, n)) for n in (0, 2, 1))  # read, locality 2, data cache
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), self.address(address, offset), *how)

    def prefetch_bytes(self, address: Value, offset: Value, count: int) -> None:
        """Prefetch `count` bytes from `offset` on."""
        for line in range(0, count, 64):
            self.prefetch(self.address(address, offset), line)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.intrinsic("llvm.fma.v16f32", vector_type(FLOAT), a, b, c)

    def maxnum(self, a: Value, b: Value) -> Value:
        """Elementwise maximum that ignores NaN (LLVM `maxnum`)."""
        return self.intrinsic("llvm.maxnum.v16f32", vector_type(FLOAT), a, b)

    def minnum(self, a: Value, b: Value) -> Value:
        """Elementwise minimum that ignores NaN (LLVM `minnum`)."""
        return self.intrinsic("llvm.minnum.v16f32", vector_type(FLOAT), a, b)

    def propagate_nan(self, a: Value, b: Value) -> Value:
        """Return a where it is NaN, otherwise b."""
        nan = self.builder.fcmp_unordered("uno", a.ir, a.ir)
        return Value(self, self.builder.select(nan, a.ir, b.ir))

    def select_negative(self, a: Value, b: Value, c: Value) -> Value:
        """Return b where a < 0, otherwise c."""
        below = self.builder.fcmp_ordered("<", a.ir, ir.Constant(vector_type(FLOAT), [0.0] * LANES))
        return Value(self, self.builder.select(below, b.ir, c.ir))

    def shuffle(self, a: Value, b: Value, lanes: list[int]) -> Value:
        """Return these lanes of a and b; lanes of b count from 16."""
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, ir.Constant(vector_type(INT), lanes)))

    def select_lanes(self, a: Value, begin: Value, end: Value, other: Value) -> Value:
        """Return a in lanes `begin` .. `end - 1`, otherwise `other`."""
        b = self.builder
        lanes = ir.Constant(vector_type(INT), list(range(LANES)))
        low, high = (Value(self, b.trunc(each.ir, INT)).broadcast().ir for each in (begin, end))
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        return Value(self, b.select(inside, a.ir, other.ir))

    def select_nonzero(self, condition: Value, a: Value, b: Value) -> Value:
        """Return a if the index `condition` is not 0, otherwise b."""
        zero = ir.Constant(LONG, 0)
        return Value(self, self.builder.select(self.builder.icmp_signed("!=", condition.ir, zero), a.ir, b.ir))

    def min_index(self, a: Value, b: Value) -> Value:
        """Minimum of two indices."""
        return Value(self, self.builder.select(self.builder.icmp_signed("<", a.ir, b.ir), a.ir, b.ir))

    def max_index(self, a: Value, b: Value) -> Value:
        """Maximum of two indices."""
        return Value(self, self.builder.select(self.builder.icmp_signed(">", a.ir, b.ir), a.ir, b.ir))

    def insert_lane(self, a: Value, lane: int, number: Value) -> Value:
        """Return a with `number` in one lane."""
        return Value(self, self.builder.insert_element(a.ir, number.ir, ir.Constant(INT, lane)))

    def first_lane(self, a: Value) -> Value:
        return Value(self, self.builder.extract_element(a.ir, ir.Constant(INT, 0)))

    def modulo(self, a: Value, divisor: int) -> Value:
        """Remainder of an index a >= 0."""
        return a - a / divisor * divisor

    def extend_short(self, a: Value) -> Value:
        """Zero-extend int16 to int32."""
        return Value(self, self.builder.zext(a.ir, INT))

    def extend_index(self, a: Value) -> Value:
        """Sign-extend int32 to an index."""
        return Value(self, self.builder.sext(a.ir, LONG))

    def absolute(self, a: Value) -> Value:
        return self.intrinsic("llvm.fabs.v16f32", vector_type(FLOAT), a)

    def reduce_max(self, a: Value) -> Value:
        """Maximum of the 16 lanes, ignoring NaN."""
        return self.intrinsic("llvm.vector.reduce.fmax.v16f32", FLOAT, a)

    def reduce_sum_int(self, a: Value) -> Value:
        """Sum of 16 lanes of int32."""
        return self.intrinsic("llvm.vector.reduce.add.v16i32", INT, a)

    def reduce_sum(self, a: Value) -> Value:
        """Sum of 16 lanes of float32, added pairwise at distances 8, 4, 2, 1 (a fixed order)."""
        distance = LANES // 2
        while distance:
            lanes = [(lane + distance) % LANES for lane in range(LANES)]
            rotated = self.builder.shuffle_vector(a.ir, a.ir, ir.Constant(vector_type(INT), lanes))
            a, distance = a + Value(self, rotated), distance // 2
        return self.first_lane(a)

    def sqrt(self, a: Value) -> Value:
        """Square root of a scalar."""
        return self.intrinsic("llvm.sqrt.f32", FLOAT, a)

    def reduce_nan(self, a: Value) -> Value:
        """Return NaN if any of 16 lanes, each zero or NaN, is NaN, otherwise zero."""
        bits = Value(self, self.builder.bitcast(a.ir, vector_type(INT)))
        return Value(
            self, self.builder.bitcast(self.intrinsic("llvm.vector.reduce.or.v16i32", INT, bits).ir, FLOAT)
        )

    @property
    def multiplies_four_bytes(self) -> bool:
        """Whether the processor has an instruction for `dot_bytes`."""
        return self.variant in FOUR_BYTES

    @property
    def takes_unsigned_bytes(self) -> bool:
        """Whether the first operand of `dot_bytes` is unsigned."""
        return self.variant not in ("dotprod", "i8mm")

    def dot_bytes(self, accumulator: Value, a: Value, b: Value) -> Value:
        """Add four byte products to each int32: bytes of a are 0 .. 255 (ARM: -128 .. 127), of b -128 .. 127."""
        return self.intrinsic_by_pieces(*FOUR_BYTES[self.variant], [INT, BYTE, BYTE], INT, accumulator, a, b)

    @property
    def multiplies_byte_matrices(self) -> bool:
        """Whether the processor has an instruction for `matmul_bytes`."""
        return self.variant in BYTE_MATRICES

    def matmul_bytes(self, accumulator: Value, a: Value, b: Value) -> Value:
        """Add to each 2 x 2 of int32 the products of rows of a with rows of b.

        Each 16 bytes of a and b are two rows of eight signed bytes.
        """
        return self.intrinsic_by_pieces(*BYTE_MATRICES[self.variant], [INT, BYTE, BYTE], INT, accumulator, a, b)

    def load_row_pair(self, first: Value, second: Value, offset: Value) -> Value:
        """Load eight bytes from each of two addresses, as all four pieces of 16 bytes."""
        pair = ir.Constant(ir.VectorType(LONG, 2), ir.Undefined)
        for lane, address in enumerate((first, second)):
            pair = self.builder.insert_element(pair, self.load(LONG, address, offset).ir, ir.Constant(INT, lane))
        words = self.builder.bitcast(pair, ir.VectorType(INT, 4))
        lanes = ir.Constant(vector_type(INT), list(range(4)) * 4)
        return Value(self, self.builder.shuffle_vector(words, words, lanes))

    def dot_byte_pairs(self, unsigned: Value, signed: Value) -> Value:
        """64 bytes each -> 32 int16: u[2i] * s[2i] + u[2i + 1] * s[2i + 1]. Sums beyond 16 bits are undefined."""
        if self.variant in BYTE_PAIRS:
            return self.intrinsic_by_pieces(*BYTE_PAIRS[self.variant], [BYTE, BYTE], SHORT, unsigned, signed)
        u, even, odd = self.as_shorts(unsigned), self.extend_bytes(signed, 0), self.extend_bytes(signed, 1)
        return (u & 255) * even + (u >> 8) * odd

    def pin(self, a: Value) -> Value:
        """Return 16 int32 unchanged, computed before all that is pinned later.

        LLVM would compute one sum of a kernel after the other and spill what they share; an empty instruction
        that seems to change the sum keeps the order in which terms were added.
        """
        if self.variant not in FEW_REGISTERS:
            return a
        constraint, bits = FEW_REGISTERS[self.variant]
        b, lanes = self.builder, LANES * bits // VECTOR_BITS
        register = ir.VectorType(INT, lanes)
        signature = ir.FunctionType(register, [register])
        nothing: Any = ir.InlineAsm(signature, "", f"={constraint},0", side_effect=True)
        low, high = (list(range(first, first + lanes)) for first in (0, lanes))
        halves = [
            b.call(nothing, [b.shuffle_vector(a.ir, a.ir, ir.Constant(register, half))]) for half in (low, high)
        ]
        return Value(self, b.shuffle_vector(halves[0], halves[1], ir.Constant(vector_type(INT), low + high)))

    def extend_bytes(self, a: Value, first: int, signed: bool = True) -> Value:
        """64 bytes -> 32 int16: the even bytes (first = 0), or the odd bytes (first = 1)."""
        shorts = self.as_shorts(a)
        if not signed:
            return shorts >> 8 if first else shorts & 255
        return shorts.signed_shift(8) if first else (shorts << 8).signed_shift(8)

    def extend_nibbles(self, a: Value, shift: int) -> Value:
        """64 bytes -> 32 int16: bits shift .. shift + 3 of each two bytes."""
        shorts = self.as_shorts(a) >> shift
        return shorts if shift == 12 else shorts & 15

    def as_shorts(self, a: Value) -> Value:
        """Reinterpret the bits of 16 int32 as 32 int16."""
        return Value(self, self.builder.bitcast(a.ir, ir.VectorType(SHORT, 2 * LANES)))

    def as_ints(self, a: Value) -> Value:
        """Reinterpret the bits of 32 int16 as 16 int32."""
        return Value(self, self.builder.bitcast(a.ir, vector_type(INT)))

    def truncate_shorts(self, a: Value, lanes: list[int]) -> Value:
        """Return the lowest 16 bits of these lanes of 16 int32."""
        shorts = self.builder.trunc(a.ir, vector_type(SHORT))
        return Value(self, self.builder.shuffle_vector(shorts, shorts, ir.Constant(vector_type(INT), lanes)))

    def intrinsic_by_pieces(
        self, name: str, bits: int, elements: list[ir.IntType], result: ir.IntType, *vectors: Value
    ) -> Value:
        """Call an intrinsic for vectors of `bits` bits on each piece of 512-bit vectors.

        elements: element types of its operands.
        """
        b, pieces, lanes = self.builder, VECTOR_BITS // bits, LANES * bits // VECTOR_BITS
        words = [b.bitcast(vector.ir, vector_type(INT)) for vector in vectors]
        results = []
        for piece in range(pieces):
            mask = ir.Constant(ir.VectorType(INT, lanes), list(range(piece * lanes, (piece + 1) * lanes)))
            cut = [word if pieces == 1 else b.shuffle_vector(word, word, mask) for word in words]
            operands = [b.bitcast(v, vector_of(element, bits)) for v, element in zip(cut, elements, strict=True)]
            called = self.intrinsic(name, vector_of(result, bits), *(Value(self, operand) for operand in operands))
            results.append(b.bitcast(called.ir, ir.VectorType(INT, lanes)))
        while len(results) > 1:
            lanes *= 2
            mask = ir.Constant(ir.VectorType(INT, lanes), list(range(lanes)))
            results = [b.shuffle_vector(*two, mask) for two in zip(results[::2], results[1::2], strict=True)]
        return Value(self, b.bitcast(results[0], vector_of(result, VECTOR_BITS)))

    def dot_pairs(self, a: Value, b: Value) -> Value:
        """32 int16 each -> 16 int32: a[2i] * b[2i] + a[2i + 1] * b[2i + 1]."""
        if self.variant in SHORT_PAIRS:
            return self.intrinsic_by_pieces(*SHORT_PAIRS[self.variant], [SHORT, SHORT], INT, a, b)
        products = []
        for first in (0, 1):
            lanes = ir.Constant(vector_type(INT), list(range(first, 2 * LANES, 2)))
            x, y = (
                self.builder.sext(self.builder.shuffle_vector(v.ir, v.ir, lanes), vector_type(INT)) for v in (a, b)
            )
            products.append(Value(self, self.builder.mul(x, y)))
        return products[0] + products[1]


def intrinsic_suffix(element: ir.Type) -> str:
    """Name of an element type as intrinsics spell it."""
    return {"float": "f32", "half": "f16"}.get(str(element), str(element))


def element_bytes(element: Element) -> int:
    return 4 if element == FLOAT else 2


def vector_type(element: Any) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def vector_of(element: ir.IntType, bits: int) -> ir.VectorType:
    """Vector type of `bits` bits."""
    return ir.VectorType(element, bits // cast(ir.IntType, element).width)
